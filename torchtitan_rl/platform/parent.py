"""No process outlives the one that has started it, however that one ends."""

import ctypes
import os
import signal

_LIBC = ctypes.CDLL(None)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; a hang in C does not prevent it."""
    set_death_signal(signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)


def set_death_signal(number: int) -> None:
    """Choose the signal that this process gets when its parent dies; 0 is none."""
    set_parent_death_signal = 1  # linux/prctl.h
    _LIBC.prctl(set_parent_death_signal, number, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of whatever a dead worker leaves behind, so that it is ended too."""
    set_child_subreaper = 36  # linux/prctl.h
    _LIBC.prctl(set_child_subreaper, 1, 0, 0, 0)
