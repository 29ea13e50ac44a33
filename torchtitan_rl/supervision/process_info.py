"""An actor that knows its process. It imports little, because every worker has it."""

import os
from pathlib import Path

from monarch.actor import Actor, endpoint


class ProcessInfo(Actor):
    """Returns the process and the machine it lives on."""

    @endpoint
    async def get(self) -> tuple[int, str]:
        # The id of the running kernel, equal for all containers on it; a host name is no proof.
        return os.getpid(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
