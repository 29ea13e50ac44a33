"""Memory of one GPU in two processes, by CUDA IPC, as vLLM's `ipc` engine does it.

NCCL refuses two ranks on one GPU. Their memory is the same anyway: nothing is sent.
"""

from typing import Any

import torch

_DEVICE_INDEX = 6
"""Place of the device among the arguments of torch's `rebuild_cuda_tensor` (torch 2.13)."""


def gpu_of(device: torch.device) -> str:
    """The GPU's own id, by which processes that number GPUs differently know it; empty for a
    CPU."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def share(memory: torch.Tensor) -> Any:
    """What another process needs to `borrow` the memory; None for a CPU's."""
    if not memory.is_cuda:
        return None
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(memory)[1]


def borrow(shared: Any, device: torch.device) -> torch.Tensor:
    """The memory that another process on this GPU has shared."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = list(shared)
    arguments[_DEVICE_INDEX] = device.index  # as this process numbers it
    return rebuild_cuda_tensor(*arguments)
