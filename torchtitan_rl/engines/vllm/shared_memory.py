"""Shared memory with a name, by which vLLM's ranks on a CPU meet: unlinked once they have met.

vLLM removes it itself when it ends in order, but a generator that is killed cannot. What is mapped
stays usable without a name. Needed for correctness, not for speed; for vLLM 0.32.
"""

import functools
from pathlib import Path

from torchtitan_rl.platform import device_type

SHARED_MEMORY = Path("/dev/shm")


def unlink_shared_memory_early() -> None:
    """Have the ranks of a tensor-parallel model on a CPU unlink the memory they share (4 MB each)
    when all of them have mapped it. To be called before vLLM sets up its process groups."""
    if device_type() != "cpu":
        return
    try:
        from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

        init = _CPUSHMDistributed._init_cpu_shm
    except (ImportError, AttributeError):  # another vLLM: it works, and a killed rank leaves files
        return

    @functools.wraps(init)
    def init_and_unlink(self: _CPUSHMDistributed) -> int:
        handle = init(self)  # ends with a barrier: every rank has mapped every file
        own = SHARED_MEMORY / f"{self.group_name}_{self.communicator.rank}"
        own.unlink(missing_ok=True)
        return handle

    _CPUSHMDistributed._init_cpu_shm = init_and_unlink
