"""Slurm in an allocation: a worker on each of its nodes, started by srun.

`nodes_of_allocation` says which nodes there are, `worker_command` is the srun command, and
`SlurmWorkers` runs it.
"""

import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.hosts.launchers.slurm_commands import SlurmError, ask, file_pattern, not_found

DEFAULT_PORT = 26600
SECRET_VARIABLE = "TORCHTITAN_RL_SECRET"
STANDARD_ERROR = 2
"""Its file descriptor; standard output is for the run's own lines."""
STOP_SECONDS = 10.0
"""How long workers may take to end after their controller has gone."""
WORKER = (sys.executable, "-m", "torchtitan_rl", "worker", "--once")
"""Command of a worker that ends when its controller has gone."""


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
    hosts = ask(["scontrol", "show", "hostnames", names], environment=environment).split()
    told = ask(["scontrol", "show", "node", "--oneliner", names], environment=environment)
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
        step.append(f"--output={file_pattern(Path(logs).absolute())}/worker-%N.log")
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
                stdout=STANDARD_ERROR,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the controller alone
            )
        except FileNotFoundError:
            raise not_found("srun") from None
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
