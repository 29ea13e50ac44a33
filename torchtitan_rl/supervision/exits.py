"""How worker processes end: seen by this process itself, at once.

Monarch takes seconds to report that a process is gone, and is the one that collects it.
"""

import fcntl
import os
import signal
import struct
import threading
import time

PIDFD_GET_INFO, PIDFD_INFO_EXIT = 0xC040FF0B, 1 << 3  # linux/pidfd.h
COLLECTING_SECONDS = 1.0
"""How long the kernel may take to note the status of a process that is just being collected."""


class Exit:
    """The end of a child process: noticed by a thread that waits for it, and leaves it to be
    collected by whoever started it.

    Whoever collects it may be quicker than the thread. Since Linux 6.15 the kernel tells the status
    even then; before, `how` stays empty.

    Example:
        exit = Exit(worker.pid)
        ...
        exit.how  # "was killed by signal 9 (SIGKILL)"
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
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
            ended = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            exited = ended.si_code == os.CLD_EXITED
            self.how = describe_exit(ended.si_status if exited else -ended.si_status)
        except ChildProcessError:  # collected already, or no child of this process
            status = _status_of_collected(self._descriptor)
            self.how = "" if status is None else describe_exit(os.waitstatus_to_exitcode(status))
        finally:
            if self._descriptor >= 0:
                os.close(self._descriptor)


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
