"""Process info: an actor in every worker that knows its process. This module imports little."""

import os

from monarch.actor import Actor, current_rank, endpoint

from torchtitan_rl.platform.titles import show_title


class ProcessInfo(Actor):
    """Returns the process that it lives in."""

    @endpoint
    async def get(self, *, ranks: int = 1) -> int:
        """`ranks` is how many processes the actor has."""
        if ranks > 1:
            show_title(f"rank {current_rank().rank}")
        return os.getpid()
