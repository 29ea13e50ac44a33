"""Process groups of two: a trainer's rank and one process of a generator, by NCCL or by gloo.

Groups of more members would break with each of them. Of a pair, one member's death concerns the
other alone: it drops the group, and whoever comes next makes a new one.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_rl.weight_sync.handle import WeightSyncError

CHUNK = 64 << 20
"""Most bytes per send: what has to arrive within the deadline."""
_IN_FLIGHT = 4
"""Sends that are under way at once."""
TRAINER, READER = 0, 1
"""Ranks in the group."""


class LinkError(WeightSyncError):
    """The other end of a transfer has died, hangs, or cannot be reached."""


class Pair:
    """The two members of a group, seen by one of them.

    A send or receive that fails, or takes longer than the deadline, drops the group and raises
    LinkError.
    """

    def __init__(self, group: Any, rank: int, seconds: float) -> None:
        self._group, self._other, self._seconds = group, 1 - rank, seconds

    def send(self, data: torch.Tensor) -> dist.Work:
        with self._dropped_on_error():
            return self._group.send([data], self._other, 0)

    def receive(self, data: torch.Tensor) -> dist.Work:
        with self._dropped_on_error():
            return self._group.recv([data], self._other, 0)

    def wait(self, work: dist.Work) -> None:
        """Wait until the bytes of a send or receive are through."""
        with self._dropped_on_error():
            work.wait(timedelta(seconds=self._seconds))

    def close(self) -> None:
        raise NotImplementedError

    @contextlib.contextmanager
    def _dropped_on_error(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.close()  # a kernel of NCCL would wait on the GPU for ever
            raise LinkError(str(error)) from error


class GlooPair(Pair):
    """A pair on CPUs, over TCP."""

    def __init__(self, store: dist.Store, rank: int, *, address: str, seconds: float) -> None:
        # torch 2.13: the options of a group, and with them its address, have no public name.
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=seconds)
        super().__init__(dist.ProcessGroupGloo(store, rank, 2, options), rank, seconds)

    def close(self) -> None:
        self._group = None  # its sockets go with it


class NcclPair(Pair):
    """A pair on two GPUs, of one host or of two."""

    def __init__(self, store: dist.Store, rank: int, *, address: str, seconds: float) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=seconds)
        with _no_watchdog():
            group = dist.ProcessGroupNCCL(store, rank, 2, options)
        super().__init__(group, rank, seconds)
        self._store = store  # by which the group opens its communicator, with the first send

    def close(self) -> None:
        self._group.abort()


_WAITING = "TORCH_NCCL_BLOCKING_WAIT"
_environment = threading.Lock()


@contextlib.contextmanager
def _no_watchdog() -> Iterator[None]:
    """Have groups made inside raise their errors in `wait`. By default a thread of torch watches a
    group, and ends the process when a transfer fails; torch reads this setting as it makes a group,
    and from the environment alone."""
    with _environment:
        before = os.environ.get(_WAITING)
        os.environ[_WAITING] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_WAITING]
            else:
                os.environ[_WAITING] = before


def join(store: dist.Store, rank: int, device: str, *, address: str, seconds: float) -> Pair:
    """Make one end of a pair, when the other end does the same."""
    make = NcclPair if torch.device(device).type == "cuda" else GlooPair
    try:
        return make(store, rank, address=address, seconds=seconds)
    except RuntimeError as error:
        raise LinkError(f"the other end did not join: {error}") from error


def listening_store(address: str, seconds: float) -> dist.TCPStore:
    """A store on a free port of this address; a store by itself would listen on all addresses."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
        master_listen_fd=listener.detach(),
    )


def connected_store(address: str, port: int, seconds: float) -> dist.TCPStore:
    """The store that listens there."""
    try:
        return dist.TCPStore(
            address, port, wait_for_workers=False, timeout=timedelta(seconds=seconds)
        )
    except RuntimeError as error:
        raise LinkError(str(error)) from error


def transfer(pair: Pair, memory: Iterable[torch.Tensor], *, sending: bool) -> None:
    """Send or receive [bytes] uint8 tensors, in order; returns when all are through."""
    start = pair.send if sending else pair.receive
    under_way: list[tuple[dist.Work, torch.Tensor]] = []
    for data in memory:
        for chunk in data.split(CHUNK):
            if len(under_way) == _IN_FLIGHT:
                pair.wait(under_way.pop(0)[0])
            under_way.append((start(chunk), chunk))
    for work, _ in under_way:
        pair.wait(work)
