"""Facts of a machine that its actors depend on: asked on the machine itself, never guessed."""

import ipaddress
import os
import socket
import sys
from dataclasses import asdict, dataclass
from typing import Any

import psutil

import torchtitan_rl
from torchtitan_rl.platform import Compute, machine_id, why_no_cuda
from torchtitan_rl.platform.machine import examine, usable_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a worker says of its machine, as JSON can have it."""

    name: str
    """Host name."""
    machine: str
    """Equal for processes that can open each other's memory files."""
    compute: Compute
    memory: int = 0
    """Bytes of memory that a process may use."""
    interface: str = ""
    """Network card that has the worker's address; empty if it is not known."""
    rdma: bool = False
    """Whether an RDMA card is up."""
    problem: str = ""
    """Why no run can work on the machine; empty: nothing is known to be wrong."""
    executable: str = sys.executable
    """The worker's Python, by which actors are started."""
    version: str = torchtitan_rl.__version__
    python: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "HostFacts":
        return cls(**{**values, "compute": Compute.from_json(values["compute"])})


def examine_host(address: str = "") -> HostFacts:
    """The facts of this machine; `address` is the one that others reach it by. torch is not
    imported."""
    machine = examine()
    problem = ""
    compute = Compute(device="cpu", cores=machine.cores)
    if machine.uses_gpus:
        gpus = _visible_gpus(len(machine.driver.gpus) if machine.driver else 0)
        compute = Compute(device="cuda", cores=machine.cores, gpus=gpus)
        problem = why_no_cuda(machine.torch_cuda)
    elif machine.asked == "cuda":
        problem = "TORCHTITAN_RL_PLATFORM is 'cuda', and there is no GPU that torch could use"
    return HostFacts(
        name=socket.gethostname(),
        machine=machine_id(),
        compute=compute,
        memory=usable_memory()[0],
        interface=interface_of(address) if address else "",
        rdma=any(machine.cards.values()),
        problem=problem,
        python=python_version(),
    )


def python_version() -> str:
    """Version of Python, as far as code that is sent from one host to another depends on it."""
    return ".".join(map(str, sys.version_info[:2]))


def interface_of(address: str) -> str:
    """Name of the network card that has an address; empty if none has it.

    Example:
        >>> interface_of("127.0.0.1")
        'lo'
    """
    wanted = ipaddress.ip_address(address)
    for name, addresses in psutil.net_if_addrs().items():
        for own in addresses:
            if own.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if ipaddress.ip_address(own.address.partition("%")[0]) == wanted:
                return name
    # All of 127.0.0.0/8 is the loopback's, which lists only one of them.
    return "lo" if wanted.is_loopback else ""


def _visible_gpus(count: int) -> tuple[str, ...]:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(chosen.split(",")) if chosen else tuple(map(str, range(count)))
