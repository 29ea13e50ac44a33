"""Process info: an actor in every worker that knows its process. This module imports little."""

import os
from pathlib import Path

from monarch.actor import Actor, current_rank, endpoint

from torchtitan_rl.platform.titles import show_title


class ProcessInfo(Actor):
    """Returns the process and the machine it lives on."""

    @endpoint
    async def get(self, *, ranks: int = 1) -> tuple[int, str]:
        """`ranks` is how many processes the actor has."""
        if ranks > 1:
            show_title(f"rank {current_rank().rank}")
        # The id of the running kernel, equal for all containers on it; a host name is no proof.
        return os.getpid(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
