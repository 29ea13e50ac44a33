"""What happens to runs under Slurm, each as a function that raises an error if it is not right.

The training command is a stand-in that takes no time to start, and stops and saves as a run does.
"""

import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.hosts.slurm_cluster import SlurmCluster, SlurmError, missing
from torchtitan_rl.hosts.launchers.slurm_batch import SlurmJob, batch_script, log_file

ROOT = Path(__file__).parents[2]
ODD_NAME = 'it\'s "50%" & $co #'
"""What a shell, sbatch or Slurm's file names would change, in the name of a folder."""

STAND_IN = """\
#!/usr/bin/env python3
# Called as an interpreter: -m torchtitan_rl.train --run_name ... A step takes 0.2 s.
import json, os, signal, sys, time
arguments = sys.argv[3:]
value = dict(zip(arguments, arguments[1:]))
folder = os.path.join(value["--output_dir"], value["--run_name"])
config, steps = os.path.join(folder, "config.json"), os.path.join(folder, "steps")
resumed = "--resume" in arguments
if os.path.exists(config) != resumed:
    sys.exit(2)
open(config, "w").write(json.dumps(arguments))
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
done = int(open(steps).read()) if resumed else 0
print(f"begins at step {done}", flush=True)
while done < int(value["--steps"]) and not told:
    time.sleep(0.2)
    done += 1
    if value.get("--fails_at") == str(done):
        sys.exit(1)
for _ in range(10):  # saving takes a second
    time.sleep(0.1)
    if len(told) > 1:
        print("stopped at once", flush=True)
        sys.exit(1)
open(steps, "w").write(str(done))
print(f"saved step {done}", flush=True)
sys.exit(130 if told else 0)
"""


class Runs:
    """Batch jobs of the stand-in on a cluster."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.python = folder / "python"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)

    def start(self, name: str, job: SlurmJob, *arguments: str, steps: int = 1000) -> int:
        """Submit a run; returns the job's number when its training has begun."""
        script = batch_script(
            job,
            ["--steps", str(steps), *arguments],
            run_name=name,
            output_dir=self.folder,
            folder=self.folder,
            python=str(self.python),
        )
        log_file(name, self.folder).parent.mkdir(parents=True, exist_ok=True)
        number = int(self.cluster.submit(script))
        self.cluster.until(lambda: "begins" in self.log(name), f"run {name} begins")
        return number

    def log(self, name: str) -> str:
        file = log_file(name, self.folder)
        return file.read_text() if file.exists() else ""

    def goes_on(self, name: str) -> None:
        """Wait until a run has been started twice, the second time from what the first saved."""
        self.cluster.until(lambda: self.log(name).count("begins") == 2, f"{name} goes on")
        begun = re.findall(r"begins at step (\d+)", self.log(name))
        saved = re.findall(r"saved step (\d+)", self.log(name))
        assert begun[1] == saved[0] != "0", self.log(name)


# ---- what happens to a run ----------------------------------------------------------------------


def ends(runs: Runs) -> None:
    """A run that is done and one that fails are not queued again."""
    # What a shell, sbatch and Slurm's file names would change reaches the command as it was.
    odd = """a b'c"$(echo 1) % #\\"""
    job = runs.start("done", SlurmJob(nodes=2, gpus_per_node=1), "--x", odd, steps=2)
    runs.cluster.until_state(job, "COMPLETED")
    arguments = json.loads((runs.folder / "done" / "config.json").read_text())
    assert arguments[:4] == ["--steps", "2", "--x", odd]
    job = runs.start("fails", SlurmJob(nodes=2), "--fails_at", "2")
    runs.cluster.until_state(job, "FAILED")
    assert runs.cluster.job(job)["ExitCode"] == "1:0"
    assert "queued again" not in runs.log("done") + runs.log("fails")


def cancelled(runs: Runs) -> None:
    """scancel lets a run save once, and ends it for good."""
    job = runs.start("cancelled", SlurmJob(nodes=2))
    runs.cluster.cancel(job)
    runs.cluster.until_state(job, "CANCELLED")
    assert re.search(r"saved step \d+", runs.log("cancelled")), runs.log("cancelled")
    assert "queued again" not in runs.log("cancelled")


def near_the_time_limit(runs: Runs) -> None:
    """A run is told to stop before the time limit, saves, is queued again, and goes on."""
    # Slurm's times are whole minutes, and its signal may come a minute early: here, at once.
    job = runs.start("limit", SlurmJob(nodes=2, time="1", signal_seconds=50))
    runs.goes_on("limit")
    assert runs.cluster.job(job)["Restarts"] == "1"
    runs.cluster.cancel(job)


def preempted(runs: Runs) -> None:
    """A run gives way to a more urgent job, and goes on after it."""
    job = runs.start("preempted", SlurmJob(nodes=2))
    time.sleep(1)  # a step or more
    urgent = runs.cluster.submit(
        "#!/bin/sh\nsleep 1\n", "--nodes=2", "--partition=urgent", "--exclusive"
    )
    runs.cluster.until_state(urgent, "COMPLETED")
    runs.goes_on("preempted")
    runs.cluster.cancel(job)


def requeued(runs: Runs) -> None:
    """`scontrol requeue`, by whoever, lets a run save; Slurm queues it again, and it goes on."""
    job = runs.start("requeued", SlurmJob(nodes=2))
    time.sleep(1)
    runs.cluster.requeue(job)
    runs.goes_on("requeued")
    assert "queued again" not in runs.log("requeued")
    runs.cluster.cancel(job)


def node_lost(runs: Runs) -> None:
    """Slurm queues a run again when one of its nodes is turned off; it goes on with what it has."""
    job = runs.start("lost", SlurmJob(nodes=2))
    node = runs.cluster.nodes[1]
    runs.cluster.kill(node)
    runs.cluster.until(lambda: runs.cluster.job(job)["Restarts"] == "1", "the job is queued again")
    assert "down" in runs.cluster.node_state(node)
    runs.cluster.boot(node)
    runs.cluster.until(lambda: runs.log("lost").count("begins") == 2, "the run goes on")
    runs.cluster.cancel(job)


WORKER = """\
import os, signal, sys, time
node, words = os.environ["SLURMD_NODENAME"], sys.argv[1:]
ignored = signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
print(node, *words, os.environ["TORCHTITAN_RL_SECRET"], ignored, flush=True)
if node == "slurm1":
    sys.exit(3)
while not os.path.exists("controller-gone"):
    time.sleep(0.1)
print("still here", flush=True)
time.sleep(1000)
"""

INSIDE = """\
import os, sys, time
from torchtitan_rl.hosts.launchers.slurm import SlurmWorkers
worker = (sys.executable, sys.argv[1])
workers = SlurmWorkers(secret="not to be seen", logs=sys.argv[2], worker=worker)
print(workers.start(), flush=True)
commands = os.popen("ps -eo args").read()
assert "worker.py" in commands and "not to be seen" not in commands
while not workers.why_gone(0):
    time.sleep(0.1)
print(workers.why_gone(0), "/", workers.why_gone(1), flush=True)
while not os.path.exists("controller-gone"):
    time.sleep(0.1)
start = time.monotonic()
workers.stop(patience=1)
print("stopped after", time.monotonic() - start, "s:", workers.why_gone(1), flush=True)
"""


def workers(runs: Runs) -> None:
    """In an allocation, a worker starts on each node with its address; one that ends, or SIGTERM
    from Slurm, leaves the others."""
    folder = runs.folder / "workers %"
    folder.mkdir()
    (folder / "worker.py").write_text(WORKER)
    (folder / "inside.py").write_text(INSIDE)
    command = [sys.executable, str(folder / "inside.py"), str(folder / "worker.py"), str(folder)]
    script = f"#!/bin/sh\ncd {shlex.quote(str(folder))}\nexport PYTHONPATH={ROOT}\n"
    options = ("--nodes=2", "--cpus-per-task=2", "--gpus-per-node=2")
    job = runs.cluster.submit(f"{script}exec {shlex.join(command)}\n", *options)
    cluster = runs.cluster
    cluster.until(lambda: "task 0: Exited with exit code 3 / \n" in cluster.output(job), "one ends")
    cluster.cancel(job, "--signal=TERM")
    time.sleep(1)
    (folder / "controller-gone").touch()
    cluster.until_state(job, "COMPLETED", "FAILED")
    first, second = (f"{node.address}:26600" for node in cluster.nodes)
    logs = [(folder / f"worker-slurm{i}.log").read_text() for i in (1, 2)]
    assert logs[0].startswith(f"slurm1 --address {first} not to be seen True\n"), logs
    assert logs[1].startswith(f"slurm2 --address {second} not to be seen True\nstill here\n"), logs
    said = cluster.output(job)
    assert str([first, second]) in said
    assert cluster.state(job) == "COMPLETED", said


CASES: tuple[Callable[[Runs], None], ...] = (
    *(ends, cancelled, near_the_time_limit, preempted, requeued, node_lost, workers),
)


def checks() -> Iterator[tuple[str, str, Callable[[], None]]]:
    """Each case by its name, with a line about it, to be run on a cluster of its own."""
    for case in CASES:
        yield case.__name__, " ".join((case.__doc__ or "").split()), partial(check, (case,))


def check(cases: Sequence[Callable[[Runs], None]] = CASES) -> None:
    """Run cases on one cluster; the error of one that fails has Slurm's logs."""
    if why := missing():
        raise SlurmError(why)
    user_signal = "SlurmctldParameters=preempt_send_user_signal"
    with tempfile.TemporaryDirectory(prefix=ODD_NAME) as folder:
        with SlurmCluster(kill_wait=5, grace=10, more=[user_signal]) as cluster:
            for case in cases:
                try:
                    case(Runs(cluster, Path(folder)))
                    cluster.until(cluster.idle, "all nodes are idle again")
                except Exception as error:
                    error.add_note(f"in {case.__name__}:\n{cluster.logs()}")
                    raise
        nothing_left(cluster)


def nothing_left(cluster: SlurmCluster) -> None:
    """No process and no file of a closed cluster is there any more."""
    assert not cluster.folder.exists()
    commands = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(cluster.folder) not in commands, commands
    assert not re.search(r"^\S*(slurmctld|slurmd|slurmstepd|munged)\b", commands, re.M), commands
    assert str(cluster.folder) not in Path("/proc/mounts").read_text()
