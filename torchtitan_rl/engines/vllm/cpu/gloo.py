"""Process groups by gloo, in a process that has many."""

import functools
import os
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo


def share_one_loop() -> None:
    """From now on, have all of gloo's process groups here share one thread that looks for messages.

    Each would have its own, which wakes up every hundredth of a second. vLLM makes 13 groups even
    for a model in one process: so many wake-ups take a thirtieth of a core from who computes.
    """
    gloo: Any = ProcessGroupGloo
    make = gloo.__init__

    @functools.wraps(make)
    def __init__(
        self: ProcessGroupGloo,
        store: Any,
        rank: int,
        size: int,
        timeout: Any = timedelta(minutes=30),
    ) -> None:
        options = timeout  # which may stand in its place
        # Who names a network card gets torch's own way, which knows that name.
        if isinstance(timeout, timedelta) and not os.environ.get("GLOO_SOCKET_IFNAME"):
            options = gloo._Options()
            options._devices = [_device()]
            options._timeout = timeout
        make(self, store, rank, size, options)

    gloo.__init__ = __init__


@functools.cache
def _device() -> Any:
    return ProcessGroupGloo.create_default_device()
