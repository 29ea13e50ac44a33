"""What NVIDIA's driver says of its GPUs, by its management library: without CUDA, without torch.

So it is known also of a driver that is too old for torch, which then sees no GPU at all.
"""

import ctypes
import os
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
NO_DRIVER = (9, 12)
"""Error codes of a library without a driver, as in some container images: there is no GPU."""
MISMATCH = 18
"""Error code of a library and a kernel module of two versions: updated, and not restarted."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine."""

    name: str
    capability: tuple[int, int]
    """Compute capability: (9, 0) for an H100."""
    total: int = 0
    """Bytes of memory; 0: unknown, as where GPU and CPU share it."""
    free: int = 0
    """Bytes of memory that nobody uses."""


@dataclass(frozen=True, slots=True)
class Driver:
    """NVIDIA's driver and its GPUs."""

    version: str = ""
    cuda: tuple[int, int] = (0, 0)
    """Newest version of CUDA that it can run."""
    gpus: tuple[Gpu, ...] = ()
    """GPUs that CUDA_VISIBLE_DEVICES does not hide."""
    error: str = ""
    """Why it cannot be asked, if it cannot."""


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def read_driver() -> Driver | None:
    """The driver of this machine; None if there is none."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    code = library.nvmlInit_v2()
    if code in NO_DRIVER:
        return None
    if code:
        return Driver(error=_describe(library, code))
    try:
        return _read(library)
    except RuntimeError as error:
        return Driver(error=str(error))
    finally:
        library.nvmlShutdown()


def _read(library: Any) -> Driver:
    def call(name: str, *arguments: Any) -> None:
        if code := getattr(library, name)(*arguments):
            raise RuntimeError(f"{name}: {_describe(library, code)}")

    text, number, count = ctypes.create_string_buffer(96), ctypes.c_int(), ctypes.c_uint()
    call("nvmlSystemGetDriverVersion", text, len(text))
    version = text.value.decode()
    call("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(number))
    call("nvmlDeviceGetCount_v2", ctypes.byref(count))
    gpus = []
    for index in range(count.value):
        handle, memory = ctypes.c_void_p(), _Memory()
        major, minor = ctypes.c_int(), ctypes.c_int()
        call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
        call("nvmlDeviceGetName", handle, text, len(text))
        # Not known where GPU and CPU share their memory: both are 0 then.
        library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        capability = ctypes.byref(major), ctypes.byref(minor)
        call("nvmlDeviceGetCudaComputeCapability", handle, *capability)
        name, known = text.value.decode(), (major.value, minor.value)
        gpus.append(Gpu(name, known, memory.total, memory.free))
    # 13020 is 13.2.
    cuda = (number.value // 1000, number.value % 1000 // 10)
    return Driver(version, cuda, tuple(_visible(gpus)))


def _visible(gpus: list[Gpu]) -> list[Gpu]:
    """GPUs whose numbers CUDA_VISIBLE_DEVICES lists, up to the first that there is not, as CUDA
    does; all of them if it is not set, or names them in another way."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or chosen.startswith(("GPU-", "MIG-")):
        return gpus
    found = []
    for number in chosen.split(","):
        if not number.strip().isdigit() or int(number) >= len(gpus):
            break
        found.append(gpus[int(number)])
    return found


def _describe(library: Any, code: int) -> str:
    if code == MISMATCH:
        return "the driver was updated while it was in use: restart the machine"
    library.nvmlErrorString.restype = ctypes.c_char_p
    return library.nvmlErrorString(code).decode()


LEAST_DRIVER = {12: "525.60.13", 13: "580.65.06"}
"""First driver for Linux that runs programs of each major version of CUDA."""


def driver_problem(driver: Driver, cuda: str) -> str:
    """Why a driver cannot run a torch built for this version of CUDA, and what to do; empty if it
    can.

    Example:
        >>> driver_problem(Driver("550.54.14", (12, 4), (gpu,)), "13.0")
        'the driver 550.54.14 runs CUDA up to 12.4, and torch here is built for CUDA 13.0: ...'
    """
    if driver.error:
        return f"NVIDIA's driver says: {driver.error}"
    major = int(cuda.partition(".")[0])
    if not driver.gpus or driver.cuda[0] >= major:
        return ""
    least = LEAST_DRIVER.get(major, "one that does")
    return (
        f"the driver {driver.version} runs CUDA up to {driver.cuda[0]}.{driver.cuda[1]}, and torch "
        f"here is built for CUDA {cuda}: install driver {least} or newer, or run on the CPU "
        "(make install PLATFORM=cpu)"
    )
