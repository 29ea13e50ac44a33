"""Slurm in an allocation: a worker on each of its nodes, started by one srun for all.

`nodes_of_allocation` says which nodes there are, `worker_command` is the srun command, and
`SlurmHosts` runs it. srun passes its standard input on to all workers: they get the secret by it,
and end when it is closed, also when the controller is killed.
"""

import asyncio
import os
import re
import shlex
import sys
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtitan_rl.config.cluster import ClusterConfig
from torchtitan_rl.hosts.addresses import USUAL_PORT
from torchtitan_rl.hosts.launchers.slurm_commands import SlurmError, ask, not_found
from torchtitan_rl.hosts.launchers.started import LISTENING, SAID_LINES, START_SECONDS
from torchtitan_rl.hosts.secret import new_secret

WORKER = (sys.executable, "-m", "torchtitan_rl", "worker", "--stdin")
"""Command of a worker that has the secret from its standard input, and ends with that."""
STOP_SECONDS = 10.0
"""How long the workers may take to end."""
LABELLED = re.compile(r" *(\d+): (.*)")
"""A line of a task, as srun --label prints it."""


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
    nodes: Sequence[SlurmNode], *, port: int = USUAL_PORT, worker: Sequence[str] = WORKER
) -> list[str]:
    """The srun command that starts a worker on each node; it ends when all of them have.

    Args:
        nodes: Those to start a worker on.
        port: Port that all of them listen on.
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
        *("--export=ALL", "--input=all", "--label", "--job-name=torchtitan-rl-worker"),
    ]
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


class SlurmHosts:
    """The nodes of the allocation that this process is in, with a worker on each.

    Example:
        launcher = SlurmHosts(ClusterConfig(launcher="slurm"))
        places = await launcher.start()  # ["10.0.0.1:26600", "10.0.0.2:26600"]
        launcher.why_gone(1)  # "srun: Node failure on node2", or "" while it is there
        await launcher.stop()
    """

    def __init__(self, config: ClusterConfig, *, worker: Sequence[str] = WORKER) -> None:
        self.secret = new_secret()
        self._port, self._worker = config.port, worker
        self._nodes: list[SlurmNode] = []
        self._srun: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._places: dict[int, str] = {}
        self._slurm_said: list[str] = []
        self._workers_said: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=SAID_LINES))
        self._news = asyncio.Condition()

    def describe(self) -> list[str]:
        nodes = nodes_of_allocation()
        command = worker_command(nodes, port=self._port, worker=self._worker)
        names = ", ".join(node.name for node in nodes)
        return [f"start a worker on each of {names}: {shlex.join(command)}"]

    async def start(self) -> list[str]:
        """Start the workers; returns where each listens."""
        self._nodes = nodes_of_allocation()
        command = worker_command(self._nodes, port=self._port, worker=self._worker)
        try:
            self._srun = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the controller alone
            )
        except FileNotFoundError:
            raise not_found("srun") from None
        assert self._srun.stdin is not None
        self._srun.stdin.write(f"{self.secret}\n".encode())
        self._reading = asyncio.create_task(self._read(self._srun))
        await self._all_listen()
        return [self._places[number] for number in range(len(self._nodes))]

    async def _all_listen(self) -> None:
        """Wait until all workers listen, or one cannot."""
        try:
            async with asyncio.timeout(START_SECONDS), self._news:
                while len(self._places) < len(self._nodes):
                    if errors := self._failures():
                        raise SlurmError("; ".join(errors))
                    await self._news.wait()
        except TimeoutError:
            silent = [n.name for i, n in enumerate(self._nodes) if i not in self._places]
            raise SlurmError(
                f"no worker listens after {START_SECONDS:.0f} s on {', '.join(silent)}; "
                f"{' / '.join(self._slurm_said[-SAID_LINES:]) or 'srun has said nothing'}"
            ) from None

    def _failures(self) -> list[str]:
        """What is wrong with each worker that has ended, and what it said at last."""
        found = ((number, self.why_gone(number)) for number in range(len(self._nodes)))
        return [
            " / ".join([f"{self._nodes[number].name}: {why}", *self._workers_said[number]])
            for number, why in found
            if why
        ]

    async def _read(self, srun: asyncio.subprocess.Process) -> None:
        """Take note of what srun and the workers say, until all have ended."""
        assert srun.stdout is not None
        async for raw in srun.stdout:
            self._note(raw.decode(errors="replace").rstrip())
            async with self._news:
                self._news.notify_all()
        await srun.wait()
        async with self._news:
            self._news.notify_all()

    def _note(self, line: str) -> None:
        labelled = LABELLED.match(line)
        if labelled is None:
            self._slurm_said.append(line)
        elif found := LISTENING.search(line):
            self._places[int(labelled[1])] = f"{found[1]}:{found[2]}"
        else:
            self._workers_said[int(labelled[1])].append(labelled[2])

    def why_gone(self, number: int) -> str:
        """Why the worker of a node is gone for good; empty if that is not known."""
        if said := why_task_gone(self._slurm_said, number, self._nodes[number].name):
            return said
        if self._srun is not None and self._srun.returncode is not None:
            last = " / ".join(self._slurm_said[-SAID_LINES:]) or "nothing was said"
            return f"srun ended with exit code {self._srun.returncode}: {last}"
        return ""

    async def stop(self) -> None:
        """Have the workers end."""
        if self._srun is None or self._reading is None:
            return
        assert self._srun.stdin is not None
        self._srun.stdin.close()
        try:
            await asyncio.wait_for(asyncio.shield(self._reading), STOP_SECONDS)
        except TimeoutError:
            self._srun.terminate()  # srun then kills them
            await asyncio.wait({self._reading}, timeout=STOP_SECONDS)
            self._reading.cancel()


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
