"""How worker processes end: seen by this process itself, at once.

Monarch may take half a minute to report that a process is gone, and is the one that collects it.
"""

import os
import signal
import threading


class Exit:
    """The end of a child process: noticed by a thread that waits for it, and leaves it to be
    collected by whoever started it.

    Example:
        exit = Exit(worker.pid)
        ...
        exit.how  # "was killed by signal 9 (SIGKILL)"
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.how = ""
        """What happened, after "the process ..."; empty while it runs, and if it was collected
        before it could be seen."""
        # A wait in the kernel, not a poll: Monarch collects the process a moment later.
        threading.Thread(target=self._wait, name=f"exit of {pid}", daemon=True).start()

    def _wait(self) -> None:
        try:
            ended = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # collected already, or no child of this process
            return
        if ended is not None:
            self.how = describe_exit(ended.si_code, ended.si_status)


def describe_exit(code: int, status: int) -> str:
    """The end of a process in words, after "the process ...".

    Example:
        >>> describe_exit(os.CLD_EXITED, 3)
        'exited with code 3'
        >>> describe_exit(os.CLD_KILLED, 9)
        'was killed by signal 9 (SIGKILL)'
    """
    if code == os.CLD_EXITED:
        return f"exited with code {status}"
    try:
        name = f" ({signal.Signals(status).name})"
    except ValueError:  # a real-time signal
        name = ""
    return f"was killed by signal {status}{name}"
