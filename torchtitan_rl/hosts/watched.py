"""Processes of an actor on this machine, and whatever they have started: watched, and ended."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import psutil

from torchtitan_rl.hosts.exits import Exit
from torchtitan_rl.platform.janitor import JANITOR, Janitor

STOP_SECONDS = 0.5
"""How long processes get to end by themselves."""
REAP_SECONDS = 2.0
"""How long a killed process may take to give its memory back."""
CLEANERS = (JANITOR, "multiprocessing.resource_tracker")
"""Parts of the command lines of processes that are never killed: they remove what others have left
in /dev/shm or on disk when those are gone, and end by themselves."""


class WatchedProcesses:
    """Processes of one actor on this machine.

    Example:
        processes = WatchedProcesses([4711, 4712])
        processes.alive
        await processes.end()
    """

    def __init__(
        self,
        pids: Sequence[int],
        *,
        temporary: Janitor | None = None,
        on_exit: Callable[[int, str], None] | None = None,
    ) -> None:
        """`temporary` is removed when the processes have been ended. `on_exit` is called, on a
        thread of its own, with the rank of a process that has ended, and how it did."""
        self.processes = [psutil.Process(pid) for pid in pids]
        self.temporary = temporary
        self._exits = [
            Exit(pid, partial(on_exit, rank) if on_exit else None) for rank, pid in enumerate(pids)
        ]

    @property
    def alive(self) -> bool:
        """Whether none of the processes has ended."""
        return not any(map(has_ended, self.processes))

    @property
    def ends(self) -> dict[int, str]:
        """How processes have ended that have, as far as that is known, by rank."""
        return {rank: exit.how for rank, exit in enumerate(self._exits) if exit.how}

    def members(self) -> set[psutil.Process]:
        """The processes and all that they have started."""
        return {*self.processes, *started_by(self.processes)}

    async def end(self, members: Iterable[psutil.Process] = ()) -> None:
        """End the processes, also when they hang or have ended, and what they have started;
        `members` are those that were seen before."""
        all_of_them = self.members() | set(members)
        cleaners = kill(all_of_them)
        await asyncio.to_thread(psutil.wait_procs, all_of_them - cleaners, timeout=STOP_SECONDS)
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


def kill(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Kill all but the cleaners and what they have started, which are returned."""
    found, parents = list(processes), {}
    for process in found:
        with contextlib.suppress(psutil.Error):
            parents[process] = process.ppid()
    spared = {process for process in parents if _is_cleaner(process)}
    pids = {process.pid for process in spared}
    spared |= {process for process, parent in parents.items() if parent in pids}
    for process in parents.keys() - spared:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return spared


def _is_cleaner(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(cleaner in " ".join(process.cmdline()) for cleaner in CLEANERS)
    return False
