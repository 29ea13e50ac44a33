"""Choice of the transport for weights, and a publisher for it."""

import os
import secrets
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan_rl.config.weight_sync import WeightSyncConfig
from torchtitan_rl.weight_sync.handle import Transport
from torchtitan_rl.weight_sync.snapshot import Publisher


def check_folder(config: WeightSyncConfig) -> None:
    """Raise ValueError if the `folder` of a config cannot be written to; leaves nothing behind. The
    config itself does not look: it may be read where the run's file system is not."""
    if not config.folder:
        return
    folder = Path(config.folder).absolute()
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise ValueError(
            f"trainer.weight_sync.folder is {config.folder!r}, but {there} cannot be written to "
            f"({error.strerror}): name a folder that the trainer may make, on a file system "
            "that all hosts share, or leave it empty for the run's own"
        ) from error


def wants_checksums(config: WeightSyncConfig, transport: Transport, device: str) -> bool:
    """Whether a publisher computes a checksum of every tensor."""
    if config.checksums == "auto":
        return transport == "file" or (transport == "rdma" and device == "cpu")
    return config.checksums == "on"


def choose_transport(config: WeightSyncConfig, hosts: set[str]) -> tuple[Transport, str]:
    """The transport for actors on these hosts, and a line about it for the user.

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
    """Make a rank's publisher. Files go to a new folder whose name begins with `folder`; `device`
    is where the weights are."""
    options: dict[str, Any] = {"checksums": checksums, "threads": threads}
    if transport == "shm":
        from torchtitan_rl.weight_sync.shm import ShmBuffer

        return Publisher("shm", ShmBuffer, **options)
    if transport == "file":
        from torchtitan_rl.platform.janitor import Janitor
        from torchtitan_rl.weight_sync.file import FileBuffer

        own = Path(f"{folder}-{secrets.token_hex(4)}")  # other runs may use the same folder
        make, janitor = partial(FileBuffer, folder=own), Janitor(own)
        return Publisher("file", make, at_close=janitor.close, **options)
    from torchtitan_rl.weight_sync.rdma import RdmaBuffer

    return Publisher("rdma", partial(RdmaBuffer, device=device), **options)
