"""Processes of an actor: started with an environment and a log, watched, and ended without a trace.

One mesh of processes per actor, so that a death takes nobody else along.
"""

import asyncio
import contextlib
import ctypes
import functools
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import monarch.actor
import psutil
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, default_bootstrap_cmd, shutdown_context, this_host
from monarch.spmd import setup_torch_elastic_env_async

from torchtitan_rl.core.waiting import Result, as_task, cancel
from torchtitan_rl.observability.console import console
from torchtitan_rl.platform.janitor import JANITOR, Janitor
from torchtitan_rl.platform.titles import TITLE_VARIABLE, make_title
from torchtitan_rl.platform.worker_main import LOG_VARIABLE, PARENT_VARIABLE
from torchtitan_rl.supervision.calls import ProcessEndedError, reported_end
from torchtitan_rl.supervision.exits import Exit
from torchtitan_rl.supervision.process_info import ProcessInfo

STOP_SECONDS = 0.5
"""How long processes get to end by themselves."""
START_SECONDS_VARIABLE = "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE"
"""How long Monarch waits for a new process to call back; see platform/third_party.py."""
WATCH_SECONDS = 0.5
"""How often the processes are looked at while a call waits for their reply."""
LAST_REPLY_SECONDS = 1.0
"""How long the reply of a process that has ended may still be under way."""
REPORT_SECONDS = 12.0
"""How long Monarch may take to report how a process ended; waited for if nothing else tells it."""
REAP_SECONDS = 2.0
"""How long a killed process may take to give its memory back."""
CLEANERS = (JANITOR, "multiprocessing.resource_tracker")
"""Parts of the command lines of processes that are never killed: they remove what others have left
in /dev/shm or on disk when those are gone, and end by themselves."""


@dataclass(slots=True)
class Spawned:
    """An actor and the processes it lives on."""

    actor: Any
    """Monarch's handle: `await spawned.actor.<endpoint>.call_one(...)`."""
    procs: Any
    processes: list[psutil.Process]
    host: str = ""
    """The machine that the processes are on."""
    temporary: Janitor | None = None
    """Remover of the processes' temporary files, if these have a folder of their own."""
    log_file: str = ""
    """The file that the processes print to."""
    name: str = "worker"
    """Name within a sentence: `trainer`, `generator 1`."""
    exits: list[Exit] = field(default_factory=list)
    """How each of the processes ended."""

    @property
    def alive(self) -> bool:
        """Whether none of the processes has ended."""
        return not any(map(has_ended, self.processes))

    async def watched(self, reply: Awaitable[Result]) -> Result:
        """The actor's reply to a call; ProcessEndedError soon after one of its processes has ended.
        Monarch may take half a minute to report that."""
        task = as_task(reply)
        try:
            while not (await asyncio.wait({task}, timeout=WATCH_SECONDS))[0]:
                if not self.alive:
                    await asyncio.wait({task}, timeout=LAST_REPLY_SECONDS)
                    if not any(exit.how for exit in self.exits):
                        await asyncio.wait({task}, timeout=REPORT_SECONDS)
                    break
            if task.done():
                return task.result()
        except SupervisionError as error:
            if self.alive:
                raise
            await asyncio.sleep(WATCH_SECONDS)  # until the threads of `exits` have seen it, too
            raise ProcessEndedError(self.describe_end(reported_end(error))) from error
        finally:
            await cancel(task)
        raise ProcessEndedError(self.describe_end("has ended"))

    def describe_end(self, reported: str) -> str:
        """Which process has ended and how, and where its log is. `reported` is what is said if this
        process itself has not seen how."""
        found = [(rank, exit.how) for rank, exit in enumerate(self.exits) if exit.how]
        rank, how = found[0] if found else (0, reported)
        which = f" of rank {rank}" if len(self.processes) > 1 and found else ""
        killed = "SIGKILL" in how
        why = " If nobody killed it, the machine has run out of memory." if killed else ""
        return f"the {self.name}'s process{which} {how}. Its log: {self.log_file}.{why}"

    async def stop(self) -> None:
        """End the processes and whatever they have started, also when they hang or have ended.

        What must be kept was written by an endpoint that has returned, so nothing is lost by not
        waiting for Python and vLLM to take themselves apart, which takes seconds.
        """
        family = {*self.processes, *started_by(self.processes)}
        # Monarch first: it must know that what follows is no accident.
        stopping = self.procs.stop("the run ended")
        try:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(stopping, STOP_SECONDS)
        finally:  # also when whoever stops it is cancelled
            family |= started_by(self.processes)  # a process may have started more meanwhile
            cleaners = _kill(family)
        await asyncio.to_thread(psutil.wait_procs, family - cleaners, timeout=STOP_SECONDS)
        await asyncio.to_thread(psutil.wait_procs, cleaners, timeout=REAP_SECONDS)
        if self.temporary:
            self.temporary.close()


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended. The kernel tells a parent in a microsecond; to read /proc takes
    ten times as long, or more, and a thousand generators are looked at twice a second."""
    try:
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT  # it is left to be collected
        return os.waitid(os.P_PID, process.pid, options) is not None
    except ChildProcessError:  # collected already, or no child of this process
        pass
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def started_by(workers: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Every process that these workers have started, also if they are gone.

    A process that was killed has no children that could be listed, and vLLM's workers, for
    instance, take seconds to notice that they are orphans; but they are still in its group.
    """
    found: set[psutil.Process] = set()
    groups = {worker.pid for worker in workers}
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(worker.children(recursive=True))
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) in groups and process.pid not in groups:
                found.add(process)
    return found


def _kill(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Kill all but the cleaners, which are returned."""
    cleaners = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            if any(cleaner in command for cleaner in CLEANERS):
                cleaners.add(process)
            else:
                process.kill()
    return cleaners


async def spawn(
    actor_class: type[Actor],
    *args: Any,
    env: dict[str, str],
    processes: int = 1,
    distributed: bool = False,
    own_temporary_folder: bool = False,
    log_file: str | None = None,
    **kwargs: Any,
) -> Spawned:
    """Start `processes` new processes on this host, each with one `actor_class(*args, **kwargs)`.

    With `distributed`, they also get the environment that `init_process_group` reads. With
    `own_temporary_folder`, their temporary files are removed when they have ended, however they
    end. What they print goes to `log_file`, which is named after the actor and lies in the `logs`
    of a run's folder; without one, to a temporary file, `Spawned.log_file`, that is there until
    this process ends.
    """
    outlive_workers()
    name = actor_class.__name__.lower()
    who = Path(log_file).stem.replace("-", " ") if log_file else name
    log_file = log_file or _temporary_log(name)
    start_monarch(log_file)
    title = make_title(who, Path(log_file).absolute().parent.parent.name)
    env = {**env, "PYTHONPATH": _python_path(), LOG_VARIABLE: log_file, TITLE_VARIABLE: title}
    env["VLLM_PROCESS_NAME_PREFIX"] = title
    env[PARENT_VARIABLE] = str(os.getpid())
    temporary = None  # if this fails, the folder is removed with the object
    if own_temporary_folder:
        env["TMPDIR"] = tempfile.mkdtemp(prefix="torchtitan_rl-")
        temporary = Janitor(Path(env["TMPDIR"]))
    command = default_bootstrap_cmd().with_env(env)
    command.args = ["-m", "torchtitan_rl.platform.worker_main"]
    procs = await _start_processes(name, processes, command)
    try:
        if distributed:
            await setup_torch_elastic_env_async(procs, "127.0.0.1", _free_port())
        # Each process is asked for its id: meshes may start side by side, so children do not tell.
        infos = per_rank(await procs.spawn("process_info", ProcessInfo).get.call(ranks=processes))
        actor = procs.spawn(name, actor_class, *args, **kwargs)
        pids, host = [psutil.Process(pid) for pid, _ in infos], infos[0][1]
        exits = [Exit(pid) for pid, _ in infos]
        return Spawned(actor, procs, pids, host, temporary, log_file, who, exits)
    except BaseException:
        await _give_up(procs)
        raise


async def _give_up(procs: Any) -> None:
    with contextlib.suppress(Exception):
        await asyncio.wait_for(procs.stop("spawning failed"), STOP_SECONDS)


async def _start_processes(name: str, processes: int, command: Any) -> Any:
    """Start a mesh of processes; if one does not start in time, as on a busy machine, once more."""
    for attempt in (1, 2):
        procs = this_host().spawn_procs(
            per_host={"gpus": processes}, name=name, bootstrap_command=command
        )
        try:
            await procs.initialized
            return procs
        except BaseException as error:
            await _give_up(procs)
            if "Timeout" not in str(error):
                raise
            reason, cause = f"the {name}'s process did not start: {error}", error
        if attempt == 1:
            console.print(f"{reason}; trying once more", markup=False)
    raise TimeoutError(
        f"{reason}. Is the machine very busy? Set {START_SECONDS_VARIABLE}=300s to wait longer"
    ) from cause


def end_all_processes() -> None:
    """End every process that this program has started, and Monarch: for the end of the program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt but this
    cleaners = _kill(psutil.Process().children(recursive=True))
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


def adopt_orphans() -> None:
    """Become the parent of whatever a dead worker leaves behind, so that it is ended too."""
    set_child_subreaper = 36  # linux/prctl.h
    ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


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


def start_monarch(log_file: str) -> None:
    """Start Monarch's client in this process, unless it runs; what it prints while it starts goes
    to `log_file`."""
    global _monarch_runs
    if _monarch_runs:
        return
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
