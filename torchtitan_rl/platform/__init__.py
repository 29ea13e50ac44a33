"""Where CPU and CUDA differ, in one place.

Everything else asks it which device is here (`device_type`), what a worker process needs in its
environment (`worker_env`), and how libraries and models are adapted to it (`adapt_*`). torch is
imported when it is asked: every worker imports this package, and a grader needs no torch.
"""

import contextlib
import ctypes
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from torchtitan_rl.config.dtype import Dtype
from torchtitan_rl.platform.switches import enabled

if TYPE_CHECKING:
    import torch

DeviceType = Literal["cpu", "cuda"]


@cache
def device_type() -> DeviceType:
    """The device this machine trains and generates on; `TORCHTITAN_RL_PLATFORM` overrides."""
    chosen = os.environ.get("TORCHTITAN_RL_PLATFORM", "")
    if chosen not in ("", "cpu", "cuda"):
        raise ValueError(f"TORCHTITAN_RL_PLATFORM is {chosen!r}; it can be 'cpu' or 'cuda'")
    if chosen == "cpu":
        return "cpu"
    import torch

    if chosen == "cuda" and not torch.cuda.is_available():
        raise ValueError("TORCHTITAN_RL_PLATFORM is 'cuda' but torch sees no CUDA device here")
    return "cuda" if torch.cuda.is_available() else "cpu"


def resolve_dtype(dtype: Dtype) -> Literal["float32", "bfloat16"]:
    """`auto` is fp32 on a CPU (bf16 GEMMs are 3-9x slower on AVX2) and bf16 on a GPU.

    Example:
        >>> resolve_dtype("bfloat16")
        'bfloat16'
    """
    if dtype != "auto":
        return dtype
    return "float32" if device_type() == "cpu" else "bfloat16"


def worker_env(
    threads: int,
    *,
    role: Literal["trainer", "generator", "grader", "reference", "environment"],
    gpus: Sequence[int] | None = None,
) -> dict[str, str]:
    """Environment of one worker process. `threads` = 0 means all cores of this machine; `gpus` are
    those its mesh may see, None for all.

    Thread counts are set before the process starts, because OpenMP reads them once.
    """
    threads = threads or os.cpu_count() or 1
    env = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # Looking for GPUs must not start CUDA in a process that may fork workers.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # Weights by `rdma` without a card: connections side by side, a third more than with one.
        "MONARCH_RDMA_TCP_FALLBACK_PARALLELISM": "4",
    }
    if device_type() == "cpu" and role in ("trainer", "generator", "reference"):
        env |= _for_computing()
        # Rows of a new length, or batches of a new size, need new programs of oneDNN. Two caches,
        # oneDNN's and torch's, keep 1024 of them each, which leave holes all over the heap. A step
        # of the trainer uses about 20, in every layer, and those of steps before hardly ever again;
        # a generator needs the same few sizes in every step.
        env["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "256" if role == "generator" else "32"
        env["LRU_CACHE_CAPACITY"] = "32"
    if gpus is not None and device_type() == "cuda":
        env["CUDA_VISIBLE_DEVICES"] = ",".join(_visible_gpus()[i] for i in gpus)
    if role == "generator":
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        env["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        env["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")
        env["VLLM_NO_USAGE_STATS"] = "1"
        if device_type() == "cpu":
            # Thread placement is ours (OMP_NUM_THREADS); vLLM's own binding would pin every
            # replica to the same cores.
            env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            env["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    return {name: value for name, value in env.items() if enabled(name)}


def _for_computing() -> dict[str, str]:
    """Settings of memory and threads for processes that compute on a CPU."""
    return {
        # Keep freed memory: glibc would give large tensors back, and fault every page in again.
        "MALLOC_MMAP_THRESHOLD_": str(2**32),
        "MALLOC_TRIM_THRESHOLD_": str(2**34),
        # The heaps that glibc gives to threads hold 64 MB at most, whatever the two above say; and
        # trainer and engine compute on threads of their own.
        "MALLOC_ARENA_MAX": "1",
        # Idle threads of OpenMP sleep, so that trainer and generator leave the cores to each other
        # when they take turns; but only after a millisecond: to be woken takes as long as many an
        # operation.
        "GOMP_SPINCOUNT": "30000",
    }


RELEASE_EVERY = 10
"""Policy versions after which trainer and generators give freed memory back: lengths that differ
from step to step leave holes in the heap. To fault pages in again takes a tenth of a second."""


def release_freed_memory() -> None:
    """Give back to the system what was freed and is not soon wanted again, as after loading a
    model; `worker_env` keeps it otherwise. Does nothing where the C library has no such call."""
    if not enabled("release_freed_memory"):
        return
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _visible_gpus() -> list[str]:
    import torch

    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen.split(",") if chosen else [str(i) for i in range(torch.cuda.device_count())]


def check_gpus(needed: int) -> None:
    """On a CUDA machine, trainer, generator and reference each need GPUs of their own."""
    import torch

    if device_type() == "cuda" and torch.cuda.device_count() < needed:
        raise ValueError(
            f"the actors' parallelism needs {needed} GPUs; this machine has "
            f"{torch.cuda.device_count()}: lower trainer.parallelism, generator.replicas, "
            "generator.tensor_parallel_degree or trainer.reference.parallelism, or run on the CPU "
            "(make train PLATFORM=cpu)"
        )


def adapt_torchtitan() -> None:
    """Let torchtitan 0.3 be imported on a machine without a GPU. Must run before torchtitan is.

    It reads torch's available device type at import and falls back to "cuda" when there is none,
    and its expert-parallel kernels import Triton, which has no CPU build. Only those kernels are
    replaced, by a module that says what it needs when one of them is used.
    """
    import torch

    if device_type() == "cpu":
        torch._utils._get_available_device_type = lambda: "cpu"
        # Its routers ask for fp32 by autocast, which a CPU cannot do and need not: it computes so.
        warnings.filterwarnings("ignore", "In CPU autocast, but the target dtype")
    if importlib.util.find_spec("triton") is None:
        sys.modules.setdefault(_TRITON_KERNELS, _NeedsTriton(_TRITON_KERNELS))


_TRITON_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


class _NeedsTriton(types.ModuleType):
    """Stands for a module that cannot be imported here: any name exists, and raises when called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def unavailable(*_args: Any, **_kwargs: Any) -> Any:
            raise RuntimeError(f"{self.__name__}.{name} needs Triton, i.e. the CUDA install")

        return unavailable


def adapt_parallelized_model(model: "torch.nn.Module") -> None:
    """Make FSDP2 sum gradients over ranks: the loss is normalised over the global batch already.

    Plain sums also are all that gloo can do (it has no PREMUL_SUM).
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
