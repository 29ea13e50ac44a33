"""Which way weights go, and a publisher for it."""

import secrets
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torchtitan_rl.weight_sync.handle import Transport
from torchtitan_rl.weight_sync.snapshot import Publisher


@dataclass(kw_only=True, slots=True)
class WeightSyncConfig:
    """How weights go from the trainer to the generators."""

    transport: Literal["auto", "shm", "rdma", "file"] = "auto"
    """`shm`: shared memory, on one host. `rdma`: memory that other hosts read, over TCP where there
    is no such network card. `file`: safetensors files in `folder`. `auto`: `shm` on one host, else
    `rdma`."""
    folder: str = ""
    """For `file`: on a file system that all hosts share; empty: the run's own folder."""
    checksums: Literal["auto", "on", "off"] = "auto"
    """Have generators compare a checksum of every tensor before they load any. `auto`: not through
    shared memory, which a lock keeps as it was published, nor of GPU memory, all of which would
    have to be copied to compute one."""

    def wants_checksums(self, transport: Transport, device: str) -> bool:
        if self.checksums == "auto":
            return transport == "file" or (transport == "rdma" and device == "cpu")
        return self.checksums == "on"


def choose_transport(config: WeightSyncConfig, hosts: set[str]) -> tuple[Transport, str]:
    """The transport for actors on these hosts, and what to tell the user of it.

    Example:
        >>> choose_transport(WeightSyncConfig(), {"a"})
        ('shm', 'weights go through shared memory: all actors are on one host')
    """
    if config.transport == "shm" and len(hosts) > 1:
        raise ValueError(
            f"trainer.weight_sync.transport is shm, but the actors are on {len(hosts)} hosts: use "
            "rdma, file or auto"
        )
    chosen = config.transport
    if chosen == "auto":
        chosen = "shm" if len(hosts) == 1 else "rdma"
    if chosen == "shm":
        return chosen, "weights go through shared memory: all actors are on one host"
    if chosen == "file":
        return chosen, "weights go through files, as trainer.weight_sync.transport says"
    from monarch.rdma import get_rdma_backend

    backend = get_rdma_backend()
    if backend == "none":
        raise ValueError(
            "trainer.weight_sync.transport is rdma, which Monarch cannot do here: use shm or file"
        )
    if backend == "tcp":
        return chosen, "warning: weights go over TCP: there is no RDMA card (ibverbs) here"
    return chosen, "weights go by RDMA over ibverbs"


def make_publisher(
    transport: Transport,
    *,
    folder: str | Path = "",
    device: str = "cpu",
    checksums: bool = True,
    threads: int = 1,
) -> Publisher:
    """A rank's publisher. Files go to a new folder whose name begins with `folder`; `device` is
    where the weights are."""
    options: dict[str, Any] = {"checksums": checksums, "threads": threads}
    if transport == "shm":
        from torchtitan_rl.weight_sync.shm import ShmBuffer

        return Publisher("shm", ShmBuffer, **options)
    if transport == "file":
        from torchtitan_rl.weight_sync.file import FileBuffer, Janitor

        own = Path(f"{folder}-{secrets.token_hex(4)}")  # other runs may be given the same folder
        make, janitor = partial(FileBuffer, folder=own), Janitor(own)
        return Publisher("file", make, at_close=janitor.close, **options)
    from torchtitan_rl.weight_sync.rdma import RdmaBuffer

    return Publisher("rdma", partial(RdmaBuffer, device=device), **options)
