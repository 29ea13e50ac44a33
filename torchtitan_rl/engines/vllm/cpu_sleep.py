"""vLLM's sleep mode on a CPU, where vLLM 0.32 only says that it has none.

On a GPU vLLM unmaps the memory of weights and KV cache as it goes to sleep, keeps their addresses,
and maps new memory there as it wakes up. Its worker for a CPU gets methods that do the same, so
that the engine and its scheduler are used in one way on both. The kernel takes the pages of these
tensors back at once; a page that is written or read later is there again, filled with zeros. So a
KV cache takes, from the first sleep on, no more memory than what is written to it.
"""

import ctypes
import os
from typing import Any

import torch

from torchtitan_rl.platform import device_type, release_freed_memory

PAGE = os.sysconf("SC_PAGE_SIZE")
MADV_DONTNEED = 4  # sys/mman.h


def add_sleep_mode() -> None:
    """Give vLLM's worker for a CPU its sleep mode; elsewhere it has one. Must run in each process
    that has a part of the model."""
    if device_type() != "cpu":
        return
    from vllm.v1.worker.cpu_worker import CPUWorker

    CPUWorker.sleep = sleep
    CPUWorker.wake_up = wake_up


def sleep(worker: Any, level: int = 1) -> None:
    """Give back the memory of weights and KV cache; neither can be used before both are written
    again. vLLM's level 1, which keeps the weights, would give nothing back on a CPU."""
    if level != 2:
        raise ValueError(f"on a CPU vLLM can sleep at level 2 only; got {level}")
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    runner = worker.model_runner
    model = runner.get_model()
    for module in model.modules():
        if getattr(module, "cpu_linear", None) is not None:
            module.cpu_linear = None  # with the matrix that it has packed
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel = None
    for tensor in [*model.parameters(), *runner.kv_caches]:
        give_back(tensor)
    release_freed_memory()


def wake_up(worker: Any, tags: list[str] | None = None) -> None:
    """Do nothing: the memory is there as soon as it is written to."""


def give_back(tensor: torch.Tensor) -> None:
    """Give the memory of a tensor and of all its views back to the system; its values are lost. At
    both ends a part of a page may stay."""
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    first = -(-start // PAGE) * PAGE
    length = (start + storage.nbytes()) // PAGE * PAGE - first
    if length <= 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), MADV_DONTNEED):
        error = ctypes.get_errno()
        raise OSError(error, f"madvise of {length} bytes: {os.strerror(error)}")
