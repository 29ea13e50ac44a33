"""Where CPU and CUDA differ, in one place.

Other modules ask this one which device is here (`device_type`), what a worker process needs in its
environment (`worker_env`), and how libraries and models are adapted to it (`adapt_*`). torch is
imported only by these functions: every worker imports this package, and a grader needs no torch.
"""

import contextlib
import ctypes
import importlib.util
import os
import shutil
import sys
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchtitan_rl.config.dtype import Dtype
from torchtitan_rl.platform.nvml import driver_problem, read_driver
from torchtitan_rl.platform.switches import enabled

if TYPE_CHECKING:
    import torch

DeviceType = Literal["cpu", "cuda"]
Role = Literal["trainer", "generator", "grader", "reference", "environment"]


_assumed: DeviceType | None = None


@contextlib.contextmanager
def assume_device(device: DeviceType) -> Iterator[None]:
    """Inside the block, code is chosen as on a machine with this device, which need not be here:
    for tracing, whose tensors have no memory."""
    global _assumed
    before, _assumed = _assumed, device
    device_type.cache_clear()
    try:
        yield
    finally:
        _assumed = before
        device_type.cache_clear()


@cache
def device_type() -> DeviceType:
    """The device this machine trains and generates on; `TORCHTITAN_RL_PLATFORM` overrides."""
    if _assumed:
        return _assumed
    chosen = os.environ.get("TORCHTITAN_RL_PLATFORM", "")
    if chosen not in ("", "cpu", "cuda"):
        raise ValueError(f"TORCHTITAN_RL_PLATFORM is {chosen!r}; it can be 'cpu' or 'cuda'")
    if chosen == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if why := why_no_cuda(torch.version.cuda):
        raise ValueError(f"torch cannot use the GPUs of this machine: {why}")
    if chosen == "cuda":
        raise ValueError("TORCHTITAN_RL_PLATFORM is 'cuda' but torch sees no CUDA device here")
    return "cpu"


def why_no_cuda(cuda: str | None) -> str:
    """Why GPUs that are here cannot be used by a torch that was built for this version of CUDA, and
    what to do; empty if nothing is wrong with the driver, or if no GPU is to be used."""
    if cuda is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    driver = read_driver()
    return driver_problem(driver, cuda) if driver else ""


def resolve_dtype(dtype: Dtype, device: DeviceType | None = None) -> Literal["float32", "bfloat16"]:
    """`auto` is fp32 on a CPU (bf16 GEMMs are 3-9x slower on AVX2) and bf16 on a GPU. `device` is
    that of the machine that computes; None: of this one.

    Example:
        >>> resolve_dtype("bfloat16")
        'bfloat16'
    """
    if dtype != "auto":
        return dtype
    return "float32" if (device or device_type()) == "cpu" else "bfloat16"


def check_compiler() -> None:
    """Refuse to compile layers where there is no compiler: torch would notice in the first step."""
    variable, usual = ("CXX", ("g++",)) if device_type() == "cpu" else ("CC", ("gcc", "clang"))
    wanted = os.environ.get(variable, "").split()[:1] or usual
    if not any(map(shutil.which, wanted)):
        raise ValueError(
            f"trainer.compile needs a compiler, and there is no {' or '.join(wanted)} here: "
            f"install one, name yours in the variable {variable}, or leave trainer.compile out"
        )


def available_cores() -> int:
    """Cores that this process may use: fewer than the machine has in many a container or job."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class Compute:
    """What a machine computes with, as far as the environment of its processes depends on it."""

    device: DeviceType
    cores: int
    """Cores that a process may use."""
    gpus: tuple[str, ...] = ()
    """Names of the GPUs that a process may see, as CUDA_VISIBLE_DEVICES has them."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Compute":
        return cls(values["device"], values["cores"], tuple(values["gpus"]))


def this_compute() -> Compute:
    """What this machine computes with."""
    device = device_type()
    return Compute(device, available_cores(), _visible_gpus() if device == "cuda" else ())


def default_threads(processes: int = 1, compute: Compute | None = None) -> int:
    """CPU threads of each process of an actor that computes, unless a setting says how many;
    `processes` are those of the actor on one machine, this one unless `compute` is given.

    On a CPU the actors take turns, so all cores are for the processes of one. With GPUs they all
    run at once, one process for each GPU.
    """
    compute = compute or this_compute()
    return max(1, compute.cores // max(processes, len(compute.gpus)))


def worker_env(
    threads: int,
    *,
    role: Role,
    gpus: Sequence[int] | None = None,
    compute: Compute | None = None,
) -> dict[str, str]:
    """Environment of one worker process on this machine, or on one that has `compute`. `threads` =
    0 means `default_threads`; `gpus` are those its mesh may see, None for all.

    Thread counts are set before the process starts, because OpenMP reads them once.
    """
    compute = compute or this_compute()
    threads = threads or default_threads(compute=compute)
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
    if compute.device == "cpu" and role in ("trainer", "generator", "reference"):
        env |= _for_computing()
        # oneDNN, by which a generator multiplies, and a trainer in bf16, makes a program for every
        # new size. Two caches, its own and torch's, keep 1024 of them each, which leave holes all
        # over the heap. A trainer hardly ever needs those of steps before; a generator needs the
        # same few sizes in every step.
        env["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "256" if role == "generator" else "32"
        env["LRU_CACHE_CAPACITY"] = "32"
    if gpus is not None and compute.device == "cuda":
        env["CUDA_VISIBLE_DEVICES"] = ",".join(compute.gpus[i] for i in gpus)
    if role == "generator":
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        env["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        env["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")
        env["VLLM_NO_USAGE_STATS"] = "1"
        if compute.device == "cpu":
            # Thread placement is ours (OMP_NUM_THREADS); vLLM's own binding would pin every
            # replica to the same cores.
            env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            env["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    return {name: value for name, value in env.items() if enabled(name)}


def _for_computing() -> dict[str, str]:
    """Settings of memory for processes that compute on a CPU."""
    return {
        # Keep freed memory: glibc would give large tensors back, and fault every page in again.
        "MALLOC_MMAP_THRESHOLD_": str(2**32),
        "MALLOC_TRIM_THRESHOLD_": str(2**34),
        # One heap for all threads: from the heaps that glibc gives to threads, `malloc_trim` does
        # not give back what an engine frees that goes to sleep.
        "MALLOC_ARENA_MAX": "1",
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


def memory_in_use() -> int:
    """Bytes of memory that this process holds: on a CPU its own pages, without those of files and
    of shared memory; on a GPU all that is taken of the device, by whichever process."""
    if device_type() == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        return total - free
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def _visible_gpus() -> tuple[str, ...]:
    import torch

    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(chosen.split(",") if chosen else map(str, range(torch.cuda.device_count())))


@cache
def machine_id() -> str:
    """A text that processes which can open each other's memory files have in common, and no
    others: the running kernel and the name space of process ids. A host name is no proof."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def check_gpus(needed: int, *, can_share: bool) -> None:
    """Refuse a CUDA machine with fewer GPUs than the actors need; see `too_few_gpus`."""
    import torch

    if device_type() == "cuda" and torch.cuda.device_count() < needed:
        why = too_few_gpus(needed, torch.cuda.device_count(), can_share=can_share)
        raise ValueError(f"{why}, or run on the CPU (make train PLATFORM=cpu)")


def too_few_gpus(needed: int, there: int, *, can_share: bool) -> str:
    """What to change where there are fewer GPUs than the actors need; `can_share`: `placement
    colocated`, by which they need fewer, can be set."""
    share = (
        "set placement to colocated (--placement colocated), by which trainer and generators "
        "share GPUs and take turns, "
    )
    return (
        f"the actors' parallelism needs {needed} GPUs, and there are {there}: "
        f"{share if can_share else ''}lower trainer.parallelism, generator.replicas, "
        "generator.tensor_parallel_degree or trainer.reference.parallelism"
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
