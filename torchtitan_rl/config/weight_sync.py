"""How weights go from the trainer to the generators."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True, slots=True)
class WeightSyncConfig:
    """How weights go from the trainer to the generators."""

    transport: Literal["auto", "shm", "rdma", "file"] = "auto"
    """Way of the weights. `shm`: shared memory, on one host. `rdma`: memory that other hosts read,
    over TCP where there is no such network card. `file`: safetensors files in `folder`. `auto`:
    `shm` on one host, else `rdma`."""
    folder: str = ""
    """Folder for `file` only, on a file system that all hosts share; empty: the run's own
    folder."""
    checksums: Literal["auto", "on", "off"] = "auto"
    """Have generators compare a checksum of every tensor before they load any. `auto`: not through
    shared memory, which a lock keeps as it was published, nor of GPU memory, all of which would
    have to be copied to compute one."""
    check: bool = False
    """After every sync compare each generator's logprobs on a prompt with the trainer's: slow, to
    find out which of them is wrong."""

    def __post_init__(self) -> None:
        if self.folder and self.transport != "file":
            raise ValueError(
                f"trainer.weight_sync.folder is {self.folder!r}, but trainer.weight_sync.transport "
                f"is {self.transport}, which writes no files: set it to file, or leave the folder "
                "empty"
            )
