"""Ctrl-C while modules are imported: the process ends at once, without a traceback."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def end_on_interrupt() -> Iterator[None]:
    """Have Ctrl-C end the process as long as nothing has to be cleaned up. A KeyboardInterrupt in
    the middle of an import may end up as any other error, or nowhere.

    Changes nothing where Ctrl-C means something else already, as in a background job.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
