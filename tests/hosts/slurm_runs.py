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
from torchtitan_rl.config.cluster import SlurmConfig
from torchtitan_rl.hosts.launchers.slurm_batch import batch_script, log_file

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

    def start(self, name: str, job: SlurmConfig, *arguments: str, steps: int = 1000) -> int:
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
    job = runs.start("done", SlurmConfig(nodes=2, gpus_per_node=1), "--x", odd, steps=2)
    runs.cluster.until_state(job, "COMPLETED")
    arguments = json.loads((runs.folder / "done" / "config.json").read_text())
    assert arguments[:4] == ["--steps", "2", "--x", odd]
    job = runs.start("fails", SlurmConfig(nodes=2), "--fails_at", "2")
    runs.cluster.until_state(job, "FAILED")
    assert runs.cluster.job(job)["ExitCode"] == "1:0"
    assert "queued again" not in runs.log("done") + runs.log("fails")


def cancelled(runs: Runs) -> None:
    """scancel lets a run save once, and ends it for good."""
    job = runs.start("cancelled", SlurmConfig(nodes=2))
    runs.cluster.cancel(job)
    runs.cluster.until_state(job, "CANCELLED")
    assert re.search(r"saved step \d+", runs.log("cancelled")), runs.log("cancelled")
    assert "queued again" not in runs.log("cancelled")


def near_the_time_limit(runs: Runs) -> None:
    """A run is told to stop before the time limit, saves, is queued again, and goes on."""
    # Slurm's times are whole minutes, and its signal may come a minute early: here, at once.
    job = runs.start("limit", SlurmConfig(nodes=2, time="1", signal_seconds=50))
    runs.goes_on("limit")
    assert runs.cluster.job(job)["Restarts"] == "1"
    runs.cluster.cancel(job)


def preempted(runs: Runs) -> None:
    """A run gives way to a more urgent job, and goes on after it."""
    job = runs.start("preempted", SlurmConfig(nodes=2))
    time.sleep(1)  # a step or more
    urgent = runs.cluster.submit(
        "#!/bin/sh\nsleep 1\n", "--nodes=2", "--partition=urgent", "--exclusive"
    )
    runs.cluster.until_state(urgent, "COMPLETED")
    runs.goes_on("preempted")
    runs.cluster.cancel(job)


def requeued(runs: Runs) -> None:
    """`scontrol requeue`, by whoever, lets a run save; Slurm queues it again, and it goes on."""
    job = runs.start("requeued", SlurmConfig(nodes=2))
    time.sleep(1)
    runs.cluster.requeue(job)
    runs.goes_on("requeued")
    assert "queued again" not in runs.log("requeued")
    runs.cluster.cancel(job)


def node_lost(runs: Runs) -> None:
    """Slurm queues a run again when one of its nodes is turned off; it goes on with what it has."""
    job = runs.start("lost", SlurmConfig(nodes=2))
    node = runs.cluster.nodes[1]
    runs.cluster.kill(node)
    runs.cluster.until(lambda: runs.cluster.job(job)["Restarts"] == "1", "the job is queued again")
    assert "down" in runs.cluster.node_state(node)
    runs.cluster.boot(node)
    runs.cluster.until(lambda: runs.log("lost").count("begins") == 2, "the run goes on")
    runs.cluster.cancel(job)


WORKER = """\
import os, signal, sys, time
node, secret = os.environ["SLURMD_NODENAME"], sys.stdin.readline().strip()
address, _, port = sys.argv[-1].partition(":")
ignored = signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
if os.path.exists(f"{node}-fails"):
    sys.exit(f"{node} has no room")
open(f"{node}-started", "w").write(f"{address} {port} {ignored} {len(secret)}")
print("listening at", address, "port", port, flush=True)
if node == "slurm1" and not os.path.exists("all-stay"):
    sys.exit(3)
sys.stdin.read()
if not os.path.exists(f"{node}-hangs"):
    open(f"{node}-ended", "w").close()
    sys.exit()
time.sleep(1000)
"""

INSIDE = """\
import asyncio, os, sys, time
from torchtitan_rl.config.cluster import ClusterConfig
from torchtitan_rl.hosts.launchers import slurm

async def main():
    open("pid", "w").write(str(os.getpid()))
    slurm.STOP_SECONDS = 1.0
    config = ClusterConfig(launcher="slurm", port=7000)
    hosts = slurm.SlurmHosts(config, worker=(sys.executable, "worker.py"))
    print("said", *hosts.describe(), flush=True)
    try:
        print("places", await hosts.start(), flush=True)
    except slurm.SlurmError as error:
        print("error", error, flush=True)
        return await hosts.stop()
    commands = os.popen("ps -eo args").read()
    assert "worker.py" in commands and hosts.secret not in commands
    while not os.path.exists("go"):
        print("gone", [hosts.why_gone(0), hosts.why_gone(1)], flush=True)
        await asyncio.sleep(0.2)
    start = time.monotonic()
    await hosts.stop()
    print(f"stopped {time.monotonic() - start:.1f}", hosts.why_gone(1), flush=True)

asyncio.run(main())
"""


class Inside:
    """A controller in an allocation of both nodes, with workers that are stand-ins."""

    def __init__(self, runs: Runs, name: str, *files: str) -> None:
        self.cluster, self.folder = runs.cluster, runs.folder / name
        self.folder.mkdir()
        (self.folder / "worker.py").write_text(WORKER)
        (self.folder / "inside.py").write_text(INSIDE)
        self.touch(*files)
        run = shlex.join([sys.executable, "inside.py"])
        lines = [
            "#!/bin/sh",
            f"cd {shlex.quote(str(self.folder))}",
            f"PYTHONPATH={ROOT} {run}",
            'echo "code $?"',
            "while [ ! -e over ]; do sleep 0.2; done",  # the allocation stays
        ]
        script = "\n".join([*lines, ""])
        options = ("--nodes=2", "--cpus-per-task=2", "--gpus-per-node=2")
        self.job = self.cluster.submit(script, *options)

    def touch(self, *files: str) -> None:
        for file in files:
            (self.folder / file).touch()

    def until_said(self, text: str) -> None:
        self.cluster.until(lambda: text in self.said(), f"the controller says {text!r}")

    def said(self) -> str:
        return self.cluster.output(self.job)

    def file(self, name: str) -> str:
        return (self.folder / name).read_text()

    def ends(self, code: int = 0) -> None:
        """Wait until the controller has ended, and give back the allocation."""
        self.until_said("\ncode ")
        assert f"\ncode {code}\n" in self.said(), self.said()
        self.touch("over")
        self.cluster.until_state(self.job, "COMPLETED")


def workers(runs: Runs) -> None:
    """In an allocation, a worker starts on each node with its address; one that ends, or SIGTERM
    from Slurm, leaves the others."""
    inside = Inside(runs, "workers %")
    first, second = (node.address for node in runs.cluster.nodes)
    inside.until_said(f"places ['{first}:7000', '{second}:7000']")
    inside.until_said("gone ['srun: slurm1: task 0: Exited with exit code 3', '']")
    assert inside.file("slurm2-started").startswith(f"{second} 7000 True ")
    runs.cluster.cancel(inside.job, "--signal=TERM")
    time.sleep(1)
    assert not (inside.folder / "slurm2-ended").exists()
    inside.touch("go")
    inside.ends()
    assert (inside.folder / "slurm2-ended").exists()


def a_worker_that_cannot_start(runs: Runs) -> None:
    """The error names the node, and has the worker's words."""
    inside = Inside(runs, "cannot", "slurm2-fails", "all-stay")
    inside.ends()
    said = inside.said().partition("error ")[2]
    assert said.startswith("slurm2: srun: slurm2: task 1: Exited with exit code 1 / "), said
    assert "slurm2 has no room" in said


def a_worker_that_hangs(runs: Runs) -> None:
    """A worker that does not end with its controller's connection is killed."""
    inside = Inside(runs, "hangs", "all-stay", "slurm2-hangs", "go")
    inside.ends()
    assert "stopped 1." in inside.said(), inside.said()
    assert (inside.folder / "slurm1-ended").exists()


def a_controller_that_is_killed(runs: Runs) -> None:
    """Workers end when the controller's process is killed, and the allocation is there still."""
    inside = Inside(runs, "killed", "all-stay")
    inside.until_said("gone")
    runs.cluster.nodes[0].run(["kill", "-KILL", inside.file("pid")], check=True)
    ended = [inside.folder / f"slurm{i}-ended" for i in (1, 2)]
    runs.cluster.until(lambda: all(file.exists() for file in ended), "the workers end")
    inside.ends(137)


CASES: tuple[Callable[[Runs], None], ...] = (
    *(ends, cancelled, near_the_time_limit, preempted, requeued, node_lost),
    *(workers, a_worker_that_cannot_start, a_worker_that_hangs, a_controller_that_is_killed),
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
