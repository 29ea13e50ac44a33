"""Choice of the transport for weights, and a publisher for it."""

import os
import secrets
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

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
        # A relay copies from host memory, wherever the weights are.
        copied = transport in ("relay", "file")
        return copied or (transport in ("rdma", "collective") and device == "cpu")
    return config.checksums == "on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What trainer and generators are, as far as the way between them depends on it."""

    hosts: frozenset[str]
    """The machines that they are on."""
    device: Literal["cpu", "cuda"] = "cpu"
    trainer_ranks: int = 1
    tensor_parallel: int = 1
    """Ranks of each generator."""
    shared_gpus: int = 0
    """GPUs that trainer and generators have in common."""


def choose_transport(config: WeightSyncConfig, ends: Ends) -> tuple[Transport, str]:
    """The transport between trainer and generators, and a line about it for the user.

    Example:
        >>> choose_transport(WeightSyncConfig(), Ends(hosts=frozenset({"a"})))
        ('shm', 'weights go through shared memory: all actors are on one host, without GPUs')
    """
    hosts = len(ends.hosts)
    if config.transport in ("shm", "collective") and hosts > 1:
        raise ValueError(
            f"trainer.weight_sync.transport is {config.transport}, but the actors are on {hosts} "
            "hosts: use relay, rdma, file or auto"
        )
    chosen = config.transport
    if chosen == "auto" and hosts > 1:
        chosen = "relay"
    elif chosen == "auto":
        # On GPUs that they share, the trainer gives its memory back while generators work.
        apart = ends.device == "cuda" and not ends.shared_gpus
        chosen = "collective" if apart else "shm"
    if chosen == "shm":
        return chosen, f"weights go through shared memory: {_why_shared_memory(ends)}"
    if chosen == "relay":
        return chosen, f"weights go {_relay_way(ends)}"
    if chosen == "file":
        return chosen, "weights go through files, as trainer.weight_sync.transport says"
    if chosen == "collective":
        return chosen, f"weights go {_collective_way(ends)}"
    from monarch.rdma import get_rdma_backend

    backend = get_rdma_backend()
    if backend == "none":
        raise ValueError(
            "trainer.weight_sync.transport is rdma, which Monarch cannot do here: use relay or file"
        )
    if backend == "tcp":
        return chosen, "warning: weights go over TCP: there is no RDMA card (ibverbs) here"
    return chosen, "weights go by RDMA over ibverbs"


def _why_shared_memory(ends: Ends) -> str:
    if ends.device == "cpu":
        return "all actors are on one host, without GPUs"
    if ends.shared_gpus:
        return (
            "trainer and generators share GPUs, and collective would keep two snapshots of the "
            "trainer's share on each"
        )
    return "trainer.weight_sync.transport says so; collective goes from GPU to GPU"


def _collective_way(ends: Ends) -> str:
    """How `collective` moves weights between these ends, in a few words."""
    slices = ends.tensor_parallel > 1
    what = "its slice of them" if slices else "all of them"
    ranks = "each rank of a generator" if slices else "each generator"
    sent = f"{ranks} receives {what} from {ends.trainer_ranks} trainer rank"
    sent += "s" if ends.trainer_ranks > 1 else ""
    if ends.device == "cpu":
        return f"through process groups, by gloo: {sent}"
    return f"from GPU to GPU, by NCCL: {sent}"


def _relay_way(ends: Ends) -> str:
    """How `relay` moves weights between these ends, in a few words."""
    if len(ends.hosts) == 1:
        return "through shared memory: all actors are on one host, and relay is between hosts"
    return (
        f"from host to host over TCP: each of the {len(ends.hosts)} hosts has one copy in "
        "shared memory, and hands it on to the next"
    )


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
    at = torch.device(device)
    options: dict[str, Any] = {"checksums": checksums, "threads": threads, "device": at}
    if transport in ("shm", "relay"):  # other hosts take a copy of it
        from torchtitan_rl.weight_sync.shm import ShmBuffer

        return Publisher(transport, ShmBuffer, **options)
    if transport == "file":
        from torchtitan_rl.platform.janitor import Janitor
        from torchtitan_rl.weight_sync.file import FileBuffer

        own = Path(f"{folder}-{secrets.token_hex(4)}")  # other runs may use the same folder
        make, janitor = partial(FileBuffer, folder=own), Janitor(own)
        return Publisher("file", make, at_close=janitor.close, **options)
    if transport == "collective":
        from torchtitan_rl.weight_sync.collective import CollectiveBuffer, Server

        server = Server(at)
        new = partial(CollectiveBuffer, server=server, device=at)
        return Publisher("collective", new, at_close=server.close, **options)
    from torchtitan_rl.weight_sync.rdma import RdmaBuffer

    return Publisher("rdma", partial(RdmaBuffer, device=device), **options)
