"""Where a process is. In a file of its own: every worker imports it, whatever else it needs."""

import os
from pathlib import Path

from monarch.actor import Actor, endpoint


class ProcessInfo(Actor):
    """Tells which process and machine it lives on."""

    @endpoint
    async def get(self) -> tuple[int, str]:
        # Of the kernel that runs, the same for all containers on it; a host name says less.
        return os.getpid(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
