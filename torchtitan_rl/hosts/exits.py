"""How worker processes end: seen on their own machine, at once.

Monarch takes seconds to report that a process is gone, and is the one that collects it.
"""

import fcntl
import os
import select
import signal
import struct
import threading
import time
from collections.abc import Callable

import psutil

PIDFD_GET_INFO, PIDFD_INFO_EXIT = 0xC040FF0B, 1 << 3  # linux/pidfd.h
POLL_SECONDS = 0.5
"""How often a process is looked for where the kernel has no file descriptors of processes."""
COLLECTING_SECONDS = 1.0
"""How long the kernel may take to note the status of a process that is just being collected."""


class Exit:
    """The end of a process: noticed by a thread that waits for it, and leaves it to be collected by
    whoever started it.

    Whoever collects it may be quicker than the thread. Since Linux 6.15 the kernel tells the status
    even then, and of processes that this one has not started; before, `how` stays empty.

    Example:
        exit = Exit(worker.pid)
        ...
        exit.how  # "was killed by signal 9 (SIGKILL)"
    """

    def __init__(self, pid: int, on_exit: Callable[[str], None] | None = None) -> None:
        """`on_exit` is called, on the thread, with `how`."""
        self._pid, self._on_exit = pid, on_exit
        self.how = ""
        """What happened, after "the process ..."; empty while it runs, and if that is not known."""
        try:
            self._descriptor = os.pidfd_open(pid)
        except OSError:  # it is gone, or this is Linux before 5.3
            self._descriptor = -1
        # A wait in the kernel, not a poll: Monarch collects the process a moment later.
        threading.Thread(target=self._wait, name=f"exit of {pid}", daemon=True).start()

    def _wait(self) -> None:
        try:
            self.how = self._status()
        finally:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            if self._on_exit:
                self._on_exit(self.how)

    def _status(self) -> str:
        try:
            ended = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            exited = ended.si_code == os.CLD_EXITED
            return describe_exit(ended.si_status if exited else -ended.si_status)
        except ChildProcessError:  # collected already, or no child of this process
            pass
        if self._descriptor >= 0:
            ending = select.poll()
            ending.register(self._descriptor, select.POLLIN)  # readable when it has ended
            ending.poll()
        while self._descriptor < 0 and psutil.pid_exists(self._pid):
            time.sleep(POLL_SECONDS)
        status = _status_of_collected(self._descriptor)
        return "" if status is None else describe_exit(os.waitstatus_to_exitcode(status))


def _status_of_collected(descriptor: int) -> int | None:
    """The wait status of a process that was collected after its pidfd was opened; None if the
    kernel does not tell it."""
    deadline = time.monotonic() + COLLECTING_SECONDS
    while time.monotonic() < deadline:
        info = bytearray(struct.pack("Q56x", PIDFD_INFO_EXIT))  # struct pidfd_info
        try:
            fcntl.ioctl(descriptor, PIDFD_GET_INFO, info)
            known, status = struct.unpack("Q52xi", info)
            if known & PIDFD_INFO_EXIT:
                return status
        except ProcessLookupError:  # the status is about to be noted
            pass
        except (OSError, ValueError):  # not known to this kernel, or no descriptor
            return None
        time.sleep(0.01)
    return None


def describe_exit(code: int) -> str:
    """The end of a process in words, after "the process ..."; a negative code is a signal's.

    Example:
        >>> describe_exit(3)
        'exited with code 3'
        >>> describe_exit(-9)
        'was killed by signal 9 (SIGKILL)'
    """
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:  # a real-time signal
        name = ""
    return f"was killed by signal {-code}{name}"
