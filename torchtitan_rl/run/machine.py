"""Machines that a run can be planned for: common GPUs by name, and this one."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.core.plugins import nearest
from torchtitan_rl.platform.machine import usable_memory


class MachineError(TorchtitanRLError, ValueError):
    """A machine that is not known; the message says which are."""


@dataclass(frozen=True, slots=True)
class PlannedGpu:
    """One GPU and its connections, as its vendor states them."""

    memory_gib: float
    tflops: float
    """Dense bfloat16, 10¹² operations a second."""
    memory_gbs: float
    """10⁹ bytes a second from and to its own memory."""
    link_gbs: float
    """10⁹ bytes a second to other GPUs of its host, in each direction: NVLink, or PCIe."""
    pcie_gbs: float
    """10⁹ bytes a second to the memory of its host."""
    network_gbs: float = 50.0
    """10⁹ bytes a second to other hosts, for each GPU: a 400 Gb/s card for each."""


GPUS = {
    "A100": PlannedGpu(80.0, 312, 2039, 300, 25, 25),
    "A100-40GB": PlannedGpu(40.0, 312, 1555, 300, 25, 25),
    "A10G": PlannedGpu(22.5, 70, 600, 25, 25, 12.5),
    "L4": PlannedGpu(22.5, 121, 300, 25, 25, 12.5),
    "L40S": PlannedGpu(45.0, 362, 864, 25, 25, 25),
    "H100": PlannedGpu(79.6, 989, 3350, 450, 50),
    "H100-PCIE": PlannedGpu(79.6, 756, 2000, 50, 50),
    "H200": PlannedGpu(140.4, 989, 4800, 450, 50),
    "B200": PlannedGpu(179.0, 2250, 7700, 900, 50),
    "GB200": PlannedGpu(185.0, 2500, 8000, 900, 200),
    "RTX4090": PlannedGpu(24.0, 165, 1008, 25, 25, 12.5),
    "RTX5090": PlannedGpu(31.8, 209, 1792, 50, 50, 12.5),
}
"""GPUs by name; A100 is the one of 80 GB. Memory is what the driver reports."""


@dataclass(frozen=True, slots=True)
class PlannedMachine:
    """What a run is planned for."""

    name: str
    count: int
    """GPUs in all; 0: the run is planned for the CPU and memory of this machine."""
    per_host: int
    """GPUs of each host."""
    gpu: PlannedGpu

    @property
    def is_cpu(self) -> bool:
        return self.count == 0

    def hosts(self, gpus: Iterable[int]) -> frozenset[int]:
        """Numbers of the hosts that GPUs are on. Those that are missing count as the last host's;
        the processes of a CPU are all on one."""
        return frozenset(min(gpu, self.count - 1) // self.per_host for gpu in gpus)

    def spans_hosts(self, ranks: tuple[int, ...], *, first: int = 0) -> bool:
        """Whether a process group is on several hosts; `first` is the GPU of its rank 0."""
        return len(self.hosts(first + rank for rank in ranks)) > 1


def parse_machine(
    given: str, *, hosts: int = 0, memory_gib: float = 0.0, tflops: float = 0.0
) -> PlannedMachine:
    """A machine by its GPUs, on hosts of 8 unless `hosts` says how many hosts there are. Sizes that
    are given take the place of those known, and are needed for a GPU of another name.

    Example:
        >>> machine = parse_machine("64xH100")
        >>> machine.count, machine.per_host, machine.gpu.memory_gib
        (64, 8, 79.6)
    """
    matched = re.fullmatch(r"(?:(\d+)x)?(.+)", given.strip(), re.IGNORECASE)
    number, name = (matched[1], matched[2]) if matched else (None, given)
    count = int(number or 1)
    known = {key.upper(): key for key in GPUS}
    key = known.get(re.sub(r"[-_ ]?(SXM\d?|NVIDIA|80GB)[-_ ]?", "", name.upper()), "")
    gpu = GPUS.get(key)
    if gpu is None and not (memory_gib and tflops):
        raise MachineError(
            f"--gpus {given}: {nearest(name, GPUS)}; for another GPU give --gpu_memory_gib and "
            "--gpu_tflops as well, e.g. --gpus 8xMine --gpu_memory_gib 64 --gpu_tflops 400"
        )
    gpu = gpu or PlannedGpu(memory_gib, tflops, 1000, 25, 25)
    gpu = replace(gpu, memory_gib=memory_gib or gpu.memory_gib, tflops=tflops or gpu.tflops)
    if count < 1 or (hosts and count % hosts):
        raise MachineError(f"--gpus {given}: {count} GPUs cannot be on {hosts} hosts alike")
    return PlannedMachine(key or name, count, count // hosts if hosts else min(count, 8), gpu)


def this_machine() -> PlannedMachine:
    """The CPU of this machine and the memory that this process may use; how fast they are is
    measured in half a second."""
    memory, _ = usable_memory()
    gpu = PlannedGpu(memory / 2**30, _matmul_tflops(), _copy_gbs(), 5, 5, 1)
    return PlannedMachine("this machine's CPU", count=0, per_host=1, gpu=gpu)


def _matmul_tflops(size: int = 1024) -> float:
    import time

    import torch

    from torchtitan_rl.models.cpu.products import product

    a = torch.ones(size, size)
    product(a, a)
    started = time.perf_counter()
    for _ in range(4):
        product(a, a)
    return 4 * 2 * size**3 / (time.perf_counter() - started) / 1e12


def _copy_gbs(nbytes: int = 2**27) -> float:
    import time

    import torch

    a, b = (torch.ones(nbytes // 4) for _ in range(2))
    b.copy_(a)
    started = time.perf_counter()
    b.copy_(a)
    return 2 * nbytes / (time.perf_counter() - started) / 1e9
