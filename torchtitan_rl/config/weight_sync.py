"""How weights go from the trainer to the generators."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True, slots=True)
class WeightSyncConfig:
    """How weights go from the trainer to the generators."""

    transport: Literal["auto", "shm", "relay", "rdma", "file", "collective"] = "auto"
    """How weights are sent. `shm`: shared memory, on one host. `collective`: process groups, on one
    host: by NCCL between GPUs, by gloo between CPUs; each rank of a generator receives its slice.
    `relay`: between hosts: a copy to each host, handed on from host to host, then shared memory.
    `rdma`: memory that other hosts read, over TCP without an RDMA card. `file`: safetensors files
    in `folder`. `auto`: on one host `collective` between GPUs, and `shm` on CPUs or shared GPUs; on
    several hosts `relay`."""
    folder: str = ""
    """Folder for `file` only, on a file system that all hosts share; empty: the run's own
    folder."""
    checksums: Literal["auto", "on", "off"] = "auto"
    """Generators compare a checksum of every tensor before they load any. `auto`: on for `file` and
    `relay`, and for `rdma` and `collective` of CPU memory. A lock protects shared memory; GPU
    memory would have to be copied to compute a checksum."""
    check: bool = False
    """After every sync, compare each generator's logprobs on a prompt with the trainer's. Slow; use
    it to find out which of them is wrong."""

    def __post_init__(self) -> None:
        if self.folder and self.transport != "file":
            raise ValueError(
                f"trainer.weight_sync.folder is {self.folder!r}, but trainer.weight_sync.transport "
                f"is {self.transport}, which writes no files: set it to file, or leave the folder "
                "empty"
            )
