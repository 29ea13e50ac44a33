"""Slurm: a batch script that goes on where it was stopped, and workers in an allocation.

Outside an allocation, `batch_script` makes the script of a run and `submit` hands it to sbatch. In
the allocation, `nodes_of_allocation` says which nodes there are, and `worker_command` is the srun
command that starts a worker on each.
"""

import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.core.errors import TorchtitanRLError

DEFAULT_PORT = 26600
LONGEST_SIGNAL_SECONDS = 65535
"""What sbatch accepts at most in --signal."""
SECRET_VARIABLE = "TORCHTITAN_RL_SECRET"
STOP_SECONDS = 10.0
"""How long workers may take to end after their controller has gone."""
OWN_OPTIONS = ("--run_name", "--output_dir", "--resume")
"""Settings of the training command that the script sets itself."""
WORKER = (sys.executable, "-m", "torchtitan_rl", "worker", "--once")
"""Command of a worker that ends when its controller has gone."""


class SlurmError(TorchtitanRLError, ValueError):
    """Slurm cannot do what was asked; the message says why, in Slurm's words if it has any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """What to ask Slurm for. Empty and 0 leave it to the cluster.

    Example:
        SlurmJob(nodes=4, partition="gpu", time="24:00:00", gpus_per_node=8, cpus_per_task=96)
    """

    nodes: int = 1
    """Nodes of the run; a worker runs on each."""
    partition: str = ""
    """Partition; sbatch --partition."""
    account: str = ""
    """Account that is charged; sbatch --account."""
    qos: str = ""
    """Quality of service; sbatch --qos."""
    time: str = ""
    """Longest time, as sbatch --time has it: 90 (minutes), 24:00:00, 2-12 (days and hours)."""
    gpus_per_node: int = 0
    """GPUs of each node."""
    cpus_per_task: int = 0
    """CPUs of each node's worker."""
    mem: str = ""
    """Memory of each node, such as 200G; 0 is all of it."""
    signal_seconds: int = 300
    """Seconds before the time limit at which the run is told to save and stop. Slurm may tell it up
    to a minute earlier."""
    args: tuple[str, ...] = ()
    """Further options of sbatch, such as --constraint=h100."""

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise SlurmError(f"nodes must be at least 1; got {self.nodes}")
        for name in ("gpus_per_node", "cpus_per_task"):
            if getattr(self, name) < 0:
                raise SlurmError(f"{name} must not be negative; got {getattr(self, name)}")
        if not 1 <= self.signal_seconds <= LONGEST_SIGNAL_SECONDS:
            raise SlurmError(
                f"signal_seconds must be 1 to {LONGEST_SIGNAL_SECONDS}; got {self.signal_seconds}"
            )
        for argument in self.args:
            if not argument.startswith("-"):
                raise SlurmError(
                    f"{argument!r} is no option of sbatch: write --name=value, in one word"
                )

    def options(self) -> Iterator[str]:
        """Options of sbatch, without those that every run has."""
        named = {
            "nodes": self.nodes,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "time": self.time,
            "gpus-per-node": self.gpus_per_node,
            "cpus-per-task": self.cpus_per_task,
            "mem": self.mem,
        }
        yield from (f"--{name}={value}" for name, value in named.items() if value)
        yield from self.args


# ---- a run as a batch job -----------------------------------------------------------------------

BODY = """\
cd {folder} || exit 1
run={run}
arguments=({arguments})
# A job that starts again, and one that is submitted again, go on where the run is.
if [ -e "$run/config.json" ]; then arguments+=(--resume); fi
echo "job $SLURM_JOB_ID, start $((${{SLURM_RESTART_COUNT:-0}} + 1)), on $SLURM_JOB_NODELIST"

job_state() {{
  scontrol show job --oneliner "$SLURM_JOB_ID" | sed -n 's/.* JobState=\\([A-Z_]*\\).*/\\1/p'
}}

# RUNNING: the time limit comes near, or another job wants the nodes; only this shell is told.
# Otherwise Slurm ends the job: it was cancelled or requeued, or its time is over. Slurm then tells
# all processes, but with cgroups this shell alone; two signals would stop the run at once.
only_this_shell() {{
  [ "$told" = RUNNING ] || scontrol show config | grep -q 'ProctrackType *= proctrack/cgroup'
}}
told=
on_term() {{
  if [ -n "$told" ]; then return; fi
  told=$(job_state)
  told=${{told:-RUNNING}}  # no answer: rather one signal too many than none
  if only_this_shell; then kill -TERM "$training"; fi
}}
training=
trap on_term TERM

{python} -m torchtitan_rl.train "${{arguments[@]}}" &
training=$!
if [ -n "$told" ]; then kill -TERM "$training"; fi  # told before there was anyone to tell
while kill -0 "$training" 2>/dev/null; do wait "$training"; done  # a signal ends `wait` early
wait "$training"
code=$?

# Only a run that was told to stop by a signal, and did, is to go on: 130 is its exit code, and 143
# that of one which had not begun. One that is done, has failed or was cancelled stays so.
if [ "$told" = RUNNING ] && {{ [ $code = 130 ] || [ $code = 143 ]; }}; then
  trap - TERM
  if [ "$(job_state)" = RUNNING ] && scontrol requeue "$SLURM_JOB_ID"; then
    echo "job $SLURM_JOB_ID is queued again, and goes on when it starts"
    sleep 60  # Slurm ends this shell
  fi
  echo "job $SLURM_JOB_ID could not be queued again; submit it again to go on"
fi
exit $code
"""


def batch_script(
    job: SlurmJob,
    arguments: Sequence[str],
    *,
    run_name: str,
    output_dir: Path | str,
    folder: Path | str = "",
    python: str = sys.executable,
) -> str:
    """Text of a batch script that trains, and goes on after the time limit and after preemption.

    The console's output is appended to slurm.log in the run's folder, which must exist when the job
    starts: `log_file` names it.

    Args:
        job: What to ask Slurm for.
        arguments: Arguments of the training command, without --run_name, --output_dir, --resume.
        run_name: Name of the run.
        output_dir: Folder of all runs; all nodes must see it.
        folder: Working folder of the training command; the current one if empty.
        python: Interpreter on the nodes.
    """
    for argument in arguments:
        if argument.partition("=")[0] in OWN_OPTIONS:
            raise SlurmError(
                f"{argument} is set by the batch script: leave it out of the arguments"
            )
    if not run_name:
        raise SlurmError("run_name is empty: a job that is queued again needs it to find its run")
    log = log_file(run_name, output_dir)
    options = [
        f"--job-name={run_name}",
        *job.options(),
        "--ntasks-per-node=1",
        "--requeue",
        f"--signal=B:TERM@{job.signal_seconds}",
        "--open-mode=append",
        f"--output={_pattern(log)}",
    ]
    words = [*arguments, "--output_dir", str(log.parents[_depth(run_name)]), "--run_name", run_name]
    for text in (*options, *words, str(folder)):
        if "\n" in text:
            raise SlurmError(f"{text!r} has a line break, which a batch script cannot have")
    body = BODY.format(
        folder=shlex.quote(str(Path(folder).absolute())),
        run=shlex.quote(str(log.parent)),
        arguments=shlex.join(words),
        python=shlex.quote(python),
    )
    directives = "\n".join(f"#SBATCH {_directive(option)}" for option in options)
    return f"#!/usr/bin/env bash\n{directives}\n\n{body}"


def log_file(run_name: str, output_dir: Path | str) -> Path:
    """The file that a job's output is appended to.

    Example:
        >>> log_file("mine", "/shared/outputs")
        PosixPath('/shared/outputs/mine/slurm.log')
    """
    return Path(output_dir).absolute() / run_name / "slurm.log"


def _depth(run_name: str) -> int:
    """How many folders above its log the folder of all runs is, by number of the parent."""
    return len(Path(run_name).parts)


def _pattern(path: Path) -> str:
    """A path as a file name of Slurm, in which % stands for something."""
    return str(path).replace("%", "%%")


def _directive(option: str) -> str:
    """An option in an #SBATCH line: sbatch splits it as a shell would, and # begins a comment.

    Example:
        >>> _directive("--comment=my run")
        '--comment="my run"'
    """
    name, equals, value = option.partition("=")
    if re.fullmatch(r"[\w@%+=:,./-]*", value, re.ASCII):
        return option
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'{name}{equals}"{escaped}"'


def submit(script: str, *, environment: Mapping[str, str] | None = None) -> int:
    """Hand a batch script to sbatch; returns the job's number."""
    said = _ask(["sbatch", "--parsable"], environment=environment, script=script)
    number = said.strip().split("\n")[-1].partition(";")[0]
    if not number.isdigit():
        raise SlurmError(f"sbatch answered {said!r}, which has no job number")
    return int(number)


def submit_run(
    job: SlurmJob,
    arguments: Sequence[str],
    *,
    run_name: str,
    output_dir: Path | str,
    folder: Path | str = "",
) -> int:
    """Submit a run as `batch_script` makes it; returns the job's number."""
    script = batch_script(job, arguments, run_name=run_name, output_dir=output_dir, folder=folder)
    # Slurm makes no folder: the job would fail, and nobody would be told.
    log_file(run_name, output_dir).parent.mkdir(parents=True, exist_ok=True)
    return submit(script)


# ---- workers in an allocation -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """A node of an allocation."""

    name: str
    address: str
    """A name or an IP address that other nodes reach it by."""


def nodes_of_allocation(environment: Mapping[str, str] | None = None) -> list[SlurmNode]:
    """The nodes of the allocation that this process is in, in Slurm's order."""
    given = os.environ if environment is None else environment
    names = given.get("SLURM_JOB_NODELIST", "")
    if not names:
        raise SlurmError(
            "SLURM_JOB_NODELIST is not set, so that this is no allocation of Slurm: start this "
            "command by sbatch or salloc, or name the machines with --hosts"
        )
    hosts = _ask(["scontrol", "show", "hostnames", names], environment=environment).split()
    told = _ask(["scontrol", "show", "node", "--oneliner", names], environment=environment)
    addresses = dict(re.findall(r"^NodeName=(\S+).*? NodeAddr=(\S+)", told, re.MULTILINE))
    return [SlurmNode(name, addresses.get(name, name)) for name in hosts]


def worker_command(
    nodes: Sequence[SlurmNode],
    *,
    port: int = DEFAULT_PORT,
    logs: Path | str = "",
    worker: Sequence[str] = WORKER,
) -> list[str]:
    """The srun command that starts a worker on each node; it ends when all of them have.

    The secret must be in the environment of the process that runs it: srun passes that on, while
    the command line can be read by every user of a node.

    Args:
        nodes: Those to start a worker on.
        port: Port that all of them listen on.
        logs: Folder for a log of each; none: they write to the output of srun.
        worker: Command of a worker, without its address.
    """
    step = [
        "srun",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(node.name for node in nodes)}",
        # All CPUs, GPUs and memory of the job's nodes, also where the controller has a part.
        *("--overlap", "--cpu-bind=none", "--mem=0"),
        # A worker that ends, or a node that fails, leaves the others: the controller decides.
        *("--kill-on-bad-exit=0", "--no-kill", "--wait=0"),
        *("--export=ALL", "--input=none", "--job-name=torchtitan-rl-worker"),
    ]
    if logs:
        step.append(f"--output={_pattern(Path(logs).absolute())}/worker-%N.log")
    return [*step, "sh", "-c", _start(nodes, port), "worker", *worker]


def _start(nodes: Sequence[SlurmNode], port: int) -> str:
    """Shell commands that become the worker of a node: "$@" with the node's address.

    SIGTERM comes to steps first when a job is cancelled or preempted. Ignored, it leaves the
    workers to the controller, which needs them to save.
    """
    other = [node for node in nodes if node.address != node.name]
    cases = " ".join(f"{shlex.quote(n.name)}) address={shlex.quote(n.address)};;" for n in other)
    named = f' case "$SLURMD_NODENAME" in {cases} esac;' if other else ""
    become = f'exec "$@" --address "$address:{port}"'
    return f"trap '' TERM; address=$SLURMD_NODENAME;{named} {become}"


def _not_found(command: str) -> SlurmError:
    return SlurmError(
        f"{command} was not found: Slurm's commands are on the login nodes of a cluster, and on "
        "its compute nodes; name the machines with --hosts where there is no Slurm"
    )


def _ask(
    command: Sequence[str], *, environment: Mapping[str, str] | None, script: str | None = None
) -> str:
    """What a command of Slurm prints; an error has its words."""
    try:
        done = subprocess.run(
            command,
            input=script,
            stdin=subprocess.DEVNULL if script is None else None,
            capture_output=True,
            text=True,
            env=None if environment is None else dict(environment),
        )
    except FileNotFoundError:
        raise _not_found(command[0]) from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise SlurmError(f"{command[0]} failed with exit code {done.returncode}: {said}")
    return done.stdout


class SlurmWorkers:
    """Workers on all nodes of the allocation that this process is in.

    Example:
        workers = SlurmWorkers(port=26600, secret=new_secret())
        addresses = workers.start()  # ["10.0.0.1:26600", "10.0.0.2:26600"]
        ...
        workers.why_gone(1)  # "Node failure on node2", or "" while it is there
        workers.stop()

    Args:
        port: Port that all of them listen on.
        secret: What they ask the controller for.
        logs: Folder for a log of each; none: they write to standard error.
        worker: Command of a worker, without its address.
    """

    def __init__(
        self,
        *,
        port: int = DEFAULT_PORT,
        secret: str,
        logs: Path | str = "",
        worker: Sequence[str] = WORKER,
    ) -> None:
        self.port, self.secret, self.logs, self.worker = port, secret, logs, worker
        self.nodes: list[SlurmNode] = []
        self._srun: subprocess.Popen[bytes] | None = None
        self._said: list[str] = []

    def start(self) -> list[str]:
        """Start the workers; returns where each will listen. It does not wait until they do."""
        self.nodes = nodes_of_allocation()
        command = worker_command(self.nodes, port=self.port, logs=self.logs, worker=self.worker)
        try:
            self._srun = subprocess.Popen(
                command,
                env={**os.environ, SECRET_VARIABLE: self.secret},
                stdin=subprocess.DEVNULL,
                stdout=None if self.logs else sys.stderr,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the controller alone
            )
        except FileNotFoundError:
            raise _not_found("srun") from None
        threading.Thread(target=self._listen, args=(self._srun,), daemon=True).start()
        return [f"{node.address}:{self.port}" for node in self.nodes]

    def _listen(self, srun: "subprocess.Popen[bytes]") -> None:
        """Keep what srun says of its tasks; the rest is the workers' own, and passed on."""
        assert srun.stderr is not None
        for raw in srun.stderr:
            line = raw.decode(errors="replace").rstrip()
            if line.startswith(("srun: ", "slurmstepd")):
                self._said.append(line)
            if not line.startswith("srun: "):
                print(line, file=sys.stderr, flush=True)

    def why_gone(self, number: int) -> str:
        """Why the worker of a node is gone for good; empty if that is not known."""
        if said := why_task_gone(self._said, number, self.nodes[number].name):
            return said
        if self._srun is not None and (code := self._srun.poll()) is not None:
            last = self._said[-1] if self._said else "nothing was said"
            return f"srun ended with exit code {code}: {last}"
        return ""

    def stop(self, patience: float = STOP_SECONDS) -> None:
        """Wait for workers that end because their controller has gone, and end the others."""
        if self._srun is None:
            return
        try:
            self._srun.wait(patience)
        except subprocess.TimeoutExpired:
            self._srun.terminate()  # srun then kills what ignores SIGTERM
            self._srun.wait()


def why_task_gone(said: Sequence[str], number: int, node: str) -> str:
    """What srun has said about the end of one of its tasks; empty if nothing.

    Example:
        >>> why_task_gone(["srun: error: n2: task 1: Exited with exit code 3"], 1, "n2")
        'srun: n2: task 1: Exited with exit code 3'
        >>> why_task_gone(["srun: error: Node failure on n2"], 1, "n2")
        'srun: Node failure on n2'
    """
    for line in said:
        text = line.removeprefix("srun: error: ")
        if match := re.match(r"\S+: tasks? ([\d,-]+): ", text):
            gone = number in _numbers(match[1])
        else:
            gone = re.match(rf"Node failure on (.*,)?{re.escape(node)}(,|$)", text) is not None
        if gone:
            return f"srun: {text}"
    return ""


def _numbers(text: str) -> set[int]:
    """Numbers of tasks as srun names them.

    Example:
        >>> sorted(_numbers("0-2,5"))
        [0, 1, 2, 5]
    """
    ranges = (part.partition("-") for part in text.split(",") if part)
    return {n for low, _, high in ranges for n in range(int(low), int(high or low) + 1)}
