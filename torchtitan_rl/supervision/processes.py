"""Processes of an actor: started with an environment and a log, watched, and ended without a trace.

One mesh of processes per actor, so that a death takes nobody else along.
"""

import asyncio
import contextlib
import functools
import ipaddress
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import monarch.actor
import psutil
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import (
    Actor,
    attach_to_workers,
    default_bootstrap_cmd,
    enable_transport,
    shutdown_context,
    this_host,
)
from monarch.spmd import setup_torch_elastic_env_async

from torchtitan_rl.core.waiting import Result, as_task, cancel, together
from torchtitan_rl.hosts.host import Host, HostProcesses, Opened, RemoteHost, check_reachable
from torchtitan_rl.hosts.messages import HostError
from torchtitan_rl.hosts.watched import REAP_SECONDS, STOP_SECONDS, kill
from torchtitan_rl.observability.console import console
from torchtitan_rl.platform.janitor import Janitor
from torchtitan_rl.platform.titles import TITLE_VARIABLE, make_title
from torchtitan_rl.platform.worker_main import LOG_VARIABLE, PARENT_VARIABLE
from torchtitan_rl.supervision.calls import HostGoneError, ProcessEndedError, reported_end
from torchtitan_rl.supervision.placement import Placement
from torchtitan_rl.supervision.process_info import ProcessInfo

HostEnvironment = Callable[[int], dict[str, str]]
"""Makes the environment of processes for the host of a number."""
START_SECONDS_VARIABLE = "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE"
"""How long Monarch waits for a new process to call back; see platform/third_party.py."""
WATCH_SECONDS = 0.5
"""How often the processes are looked at while a call waits for their reply."""
LAST_REPLY_SECONDS = 1.0
"""How long the reply of a process that has ended may still be under way."""
REPORT_SECONDS = 12.0
"""How long Monarch may take to report how a process ended; waited for if nothing else tells it."""


@dataclass(slots=True)
class Spawned:
    """An actor and the processes it lives on."""

    actor: Any
    """Monarch's handle: `await spawned.actor.<endpoint>.call_one(...)`."""
    procs: Any
    parts: Sequence[HostProcesses]
    """The processes, host by host."""
    per_host: int = 1
    """How many processes there are on each."""
    machines: frozenset[str] = frozenset()
    """The machines that they are on; processes of one machine share memory."""
    log_files: tuple[str, ...] = ("",)
    """The files that the processes print to, host by host."""
    name: str = "worker"
    """Name within a sentence: `trainer`, `generator 1`."""

    @property
    def log_file(self) -> str:
        """The file that the processes of the first host print to."""
        return self.log_files[0]

    @property
    def processes(self) -> list[psutil.Process]:
        """The processes that are on this machine."""
        return [process for part in self.parts for process in part.processes]

    @property
    def alive(self) -> bool:
        """Whether none of the processes has ended."""
        return all(part.alive for part in self.parts)

    @property
    def lost_host(self) -> str:
        """Which host of the processes is lost, and why; empty: none is."""
        return next((part.lost for part in self.parts if part.lost), "")

    async def settle(self) -> None:
        """Return when it is known whether a host of the processes is lost: Monarch, or a rank on
        another host, may report the consequences before the silence was long enough."""
        await together(*(part.settle() for part in self.parts))

    async def watched(self, reply: Awaitable[Result]) -> Result:
        """The actor's reply to a call; ProcessEndedError soon after one of its processes has ended.
        Monarch may take half a minute to report that."""
        task = as_task(reply)
        try:
            while not (await asyncio.wait({task}, timeout=WATCH_SECONDS))[0]:
                if not self.alive:
                    await asyncio.wait({task}, timeout=LAST_REPLY_SECONDS)
                    if not self.lost_host and not any(part.ends for part in self.parts):
                        await asyncio.wait({task}, timeout=REPORT_SECONDS)
                    break
            if task.done():
                return task.result()
        except Exception as error:
            await self.settle()
            if self.alive or not (self.lost_host or isinstance(error, SupervisionError)):
                raise
            if not self.lost_host:
                await asyncio.sleep(WATCH_SECONDS)  # until it was also seen how they have ended
            said = reported_end(error) if isinstance(error, SupervisionError) else ""
            raise self._ended(said) from error
        finally:
            await cancel(task)
        await self.settle()  # a host that goes may first say that its processes do
        raise self._ended("has ended")

    def _ended(self, reported: str) -> ProcessEndedError:
        if self.lost_host:
            return HostGoneError(f"the {self.name} has lost {self.lost_host}")
        return ProcessEndedError(self.describe_end(reported))

    def describe_end(self, reported: str) -> str:
        """Which process has ended and how, and where its log is. `reported` is what is said if
        nobody has seen how."""
        found = [
            (i, number, how) for i, p in enumerate(self.parts) for number, how in p.ends.items()
        ]
        part, number, how = found[0] if found else (0, 0, reported)
        several = len(self.parts) * self.per_host > 1
        which = f" of rank {part * self.per_host + number}" if several and found else ""
        killed = "SIGKILL" in how
        why = " If nobody killed it, the machine has run out of memory." if killed else ""
        log = self.log_files[part]
        return f"the {self.name}'s process{which} {how}. Its log: {log}.{why}"

    async def stop(self) -> None:
        """End the processes and whatever they have started, also when they hang or have ended.

        What must be kept was written by an endpoint that has returned, so nothing is lost by not
        waiting for Python and vLLM to take themselves apart, which takes seconds.
        """
        members = [part.members() for part in self.parts]
        # Monarch first: it must know that what follows is no accident.
        stopping = self.procs.stop("the run ended")
        try:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(stopping, STOP_SECONDS)
        finally:  # also when whoever stops it is cancelled
            for part, seen in zip(self.parts, members, strict=True):
                kill(part.members() | seen)
        await together(*(part.end(seen) for part, seen in zip(self.parts, members, strict=True)))


async def spawn(
    actor_class: type[Actor],
    *args: Any,
    env: dict[str, str] | HostEnvironment,
    placement: Placement | None = None,
    distributed: bool = False,
    own_temporary_folder: bool = False,
    log_file: str | None = None,
    **kwargs: Any,
) -> Spawned:
    """Start new processes, where `placement` says, each with one `actor_class(*args, **kwargs)`.

    `env` is their environment, or makes it for the host of a number. With `distributed`, they also
    get the environment that `init_process_group` reads. With `own_temporary_folder`, their
    temporary files are removed when they have ended, however they end. What they print goes to
    `log_file`, which is named after the actor and lies in the `logs` of a run's folder; without
    one, to a temporary file, `Spawned.log_file`, that is there until this process ends. Another
    host without that folder has a file of its own.
    """
    outlive_workers()
    placement = placement or Placement()
    hosts = placement.hosts
    name = actor_class.__name__.lower()
    who = Path(log_file).stem.replace("-", " ") if log_file else name
    log_file = os.path.abspath(log_file or _temporary_log(name))
    start_monarch(log_file, hosts)
    opened = await together(
        *(host.open(name, log_file, temporary=own_temporary_folder) for host in hosts)
    )
    title = make_title(who, Path(log_file).parent.parent.name)
    commands = [
        _command(host, files, env(number) if callable(env) else env, title)
        for number, (host, files) in enumerate(zip(hosts, opened, strict=True))
    ]
    starting = _start_on(name, placement, opened, commands, distributed=distributed)
    procs, parts = await _unless_lost(hosts, opened, starting)
    try:
        actor = procs.spawn(name, actor_class, *args, **kwargs)
    except BaseException:
        await _give_up(procs)
        raise
    return Spawned(
        actor,
        procs,
        parts,
        per_host=placement.per_host,
        machines=frozenset(host.machine for host in hosts),
        log_files=tuple(files.log_file for files in opened),
        name=who,
    )


async def _start_on(
    name: str,
    placement: Placement,
    opened: Sequence[Opened],
    commands: Sequence[Any],
    *,
    distributed: bool,
) -> tuple[Any, list[HostProcesses]]:
    """Start the processes of an actor, and watch them; returns Monarch's mesh and the processes."""
    hosts = placement.hosts
    procs = await _start_processes(name, hosts, placement.per_host, commands)
    parts: list[HostProcesses] = []
    try:
        if distributed:
            await setup_torch_elastic_env_async(procs, *await _meeting_point(hosts))
        # Each process is asked for its id: meshes may start side by side, so children do not tell.
        count = placement.processes
        asking = procs.spawn("process_info", ProcessInfo).get.call(ranks=count)
        pids = per_rank(await asyncio.wait_for(as_task(asking), start_seconds()))
        for number, (host, files) in enumerate(zip(hosts, opened, strict=True)):
            own = pids[number * placement.per_host : (number + 1) * placement.per_host]
            parts.append(await host.watch(own, files))
        return procs, parts
    except BaseException:
        await _give_up(procs)
        await together(*(part.end(set()) for part in parts))
        raise


async def _unless_lost(
    hosts: Sequence[Host], opened: Sequence[Opened], work: Awaitable[Result]
) -> Result:
    """What `work` returns; HostLostError as soon as one of the hosts is lost that it needs. Monarch
    would wait for that host for minutes."""
    task = as_task(work)
    sessions = [files.session for files in opened if files.session is not None]
    try:
        while not (await asyncio.wait({task}, timeout=WATCH_SECONDS))[0]:
            if any(session.lost for session in sessions):
                break
        else:
            return task.result()
    except Exception:
        await _settle(hosts, opened)
        raise
    finally:
        await cancel(task)
    await _settle(hosts, opened)
    raise AssertionError("a lost session was not reported")


async def _settle(hosts: Sequence[Host], opened: Sequence[Opened]) -> None:
    pairs = zip(hosts, opened, strict=True)
    await together(*(host.settle(files) for host, files in pairs))


def _command(host: Host, files: Opened, env: dict[str, str], title: str) -> Any:
    """How a worker process is started on a host."""
    env = {**env, "PYTHONPATH": _python_path(), LOG_VARIABLE: files.log_file, TITLE_VARIABLE: title}
    env["VLLM_PROCESS_NAME_PREFIX"] = title
    if files.temporary:
        env["TMPDIR"] = files.temporary
    command = default_bootstrap_cmd()
    if (facts := host.facts) is None:
        env[PARENT_VARIABLE] = str(os.getpid())
    else:  # its parent is Monarch's server there, which says so itself
        command.program = facts.executable
        if facts.interface:  # else gloo looks up the host's name, which may be another network's
            env |= {"GLOO_SOCKET_IFNAME": facts.interface, "NCCL_SOCKET_IFNAME": facts.interface}
    command = command.with_env(env)
    command.args = ["-m", "torchtitan_rl.platform.worker_main"]
    return command


async def _meeting_point(hosts: Sequence[Host]) -> tuple[str, int]:
    """Address and port at which the ranks of a mesh meet: they are tried before anybody waits
    there."""
    first = hosts[0]
    if not isinstance(first, RemoteHost):
        return first.address, _free_port()
    if why := await check_reachable([host for host in hosts if isinstance(host, RemoteHost)]):
        raise HostError(f"the ranks of an actor cannot meet: {why}")
    return first.address, await first.free_port()


async def _give_up(procs: Any) -> None:
    with contextlib.suppress(Exception):
        await asyncio.wait_for(procs.stop("spawning failed"), STOP_SECONDS)


def _mesh(name: str, hosts: Sequence[Host]) -> Any:
    """Monarch's hosts. They are connected anew for each actor: a host that was lost and came back
    has another server."""
    servers = [host.monarch for host in hosts]
    if not any(servers):
        return this_host()
    return attach_to_workers(ca="trust_all_connections", workers=servers, name=f"{name}_hosts")


async def _start_processes(
    name: str, hosts: Sequence[Host], per_host: int, commands: Sequence[Any]
) -> Any:
    """Start a mesh of processes; if one does not start in time, as on a busy machine, once more."""
    command = commands[0] if len(commands) == 1 else (lambda point: commands[point["hosts"]])
    for attempt in (1, 2):
        procs = _mesh(name, hosts).spawn_procs(
            per_host={"gpus": per_host}, name=name, bootstrap_command=command
        )
        try:
            await asyncio.wait_for(as_task(procs.initialized), start_seconds())
            return procs
        except BaseException as error:
            await _give_up(procs)
            late = isinstance(error, TimeoutError)
            if not late and "Timeout" not in str(error):
                raise
            said = "no answer in time" if late else str(error)
            reason, cause = f"the {name}'s process did not start: {said}", error
        if attempt == 1:
            console.print(f"{reason}; trying once more", markup=False)
    raise TimeoutError(
        f"{reason}. Is the machine very busy? Set {START_SECONDS_VARIABLE}=300s to wait longer"
    ) from cause


def start_seconds() -> float:
    """How long new processes may take to answer: somewhat more than Monarch itself waits."""
    text = os.environ.get(START_SECONDS_VARIABLE, "60s")
    return 1.5 * float(text.removesuffix("s")) if text.removesuffix("s").isdigit() else 900.0


def end_all_processes() -> None:
    """End every process that this program has started, and Monarch: for the end of the program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt but this
    cleaners = kill(psutil.Process().children(recursive=True))
    psutil.wait_procs(cleaners - _own_tracker(), timeout=REAP_SECONDS)
    # Monarch would do this while the interpreter exits, and print a traceback if it is too slow.
    with contextlib.suppress(Exception):
        shutdown_context(host_timeout=0.3).get(timeout=1.0)
    _reap_children()


def _own_tracker() -> set[psutil.Process]:
    """Python's resource tracker of this process, which ends after it and is not to be waited for.
    There is one if this process has made shared memory or locks with a name."""
    pid = getattr(resource_tracker._resource_tracker, "_pid", None)
    return {child for child in psutil.Process().children() if child.pid == pid}


def _reap_children() -> None:
    """Collect what was killed, so that not even a zombie of it is left: nobody else may do so."""
    deadline = time.monotonic() + REAP_SECONDS
    while left := set(psutil.Process().children()) - _own_tracker():  # orphans come one by one
        if time.monotonic() > deadline:
            return
        psutil.wait_procs(left, timeout=0.1)


@functools.cache
def _temporary() -> Janitor:
    folder = Path(tempfile.mkdtemp(prefix="torchtitan_rl-"))
    (folder / "logs").mkdir()  # as in a run's folder
    return Janitor(folder)


def _temporary_log(name: str) -> str:
    """A new file for what an actor prints; it is removed when this process ends."""
    descriptor, path = tempfile.mkstemp(".log", f"{name}-", _temporary().folder / "logs")
    os.close(descriptor)
    return path


def temporary_folder(name: str) -> str:
    """A new folder for what an actor writes; it is removed when this process ends."""
    return tempfile.mkdtemp(prefix=f"{name}-", dir=_temporary().folder)


_monarch_runs = False


def start_monarch(log_file: str, hosts: Sequence[Host] = ()) -> None:
    """Start Monarch's client in this process, unless it runs; what it prints while it starts goes
    to `log_file`. The actors of `hosts` can reach it."""
    global _monarch_runs
    if _monarch_runs:
        return
    addresses = [host.controller_address for host in hosts if host.controller_address]
    # A host on this machine may know only the loopback, by which no other reaches this process.
    others = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    if addresses:
        own = (others or addresses)[0]
        enable_transport(f"tcp://[{own}]:0" if ":" in own else f"tcp://{own}:0")
    stderr = os.dup(2)
    with open(log_file, "a") as log:
        os.dup2(log.fileno(), 2)
        try:
            monarch.actor.context()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
    _monarch_runs = True


def outlive_workers() -> None:
    """Make a dead worker an error for whoever waits for it, not the end of this process."""
    monarch.actor.unhandled_fault_hook = lambda failure: None


def per_rank(returned: Any) -> list[Any]:
    """What the ranks of a mesh have returned from a call, in rank order."""
    return list(returned.values())


def _python_path() -> str:
    # Monarch does not pass on this process's sys.path, and what a task or a plug-in is imported
    # from must be found in the workers too.
    return os.pathsep.join(path or os.getcwd() for path in ["", *sys.path])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
