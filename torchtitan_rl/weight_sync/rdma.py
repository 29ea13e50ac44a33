"""Weight sync between hosts: memory registered with Monarch, read by actors that have the handle.

Over ibverbs the network card reads the memory, GPU memory included; without such a card the same
calls go over TCP. Only an actor can make or read such memory. A generator copies it into shared
memory of its own host, which its engine's processes read like any `shm` snapshot.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import monarch
import torch
from monarch.rdma import RDMAAction, RDMABuffer, get_rdma_backend

from torchtitan_rl.core.waiting import together
from torchtitan_rl.weight_sync.handle import (
    Part,
    Slot,
    StaleHandleError,
    WeightHandle,
    WeightSyncError,
)
from torchtitan_rl.weight_sync.memory_file import WRITING
from torchtitan_rl.weight_sync.shm import ShmBuffer

_NOTHING = -1
_BLOCK = 16 << 20
"""Bytes registered in one piece; a reader skips blocks in which nothing has changed."""
_TCP_CHUNK_MB = 4
"""Size of one message over TCP. Monarch's default of 64 is three times slower on a loopback."""
_READ_SECONDS, _ANSWER_SECONDS = 120, 5
"""Deadlines for reading a part, and its header: Monarch does not report that a trainer is dead."""


@dataclass(frozen=True, slots=True)
class RdmaLocation:
    """The registered memory of one rank's snapshot."""

    token: int
    header: Any
    """Registered memory with the token, the number of the publication and its version."""
    blocks: tuple[Any, ...]
    nbytes: int


class RdmaBuffer:
    """Memory for one snapshot that other hosts can read."""

    def __init__(self, nbytes: int, device: str = "cpu") -> None:
        self.data = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._header = torch.tensor([secrets.randbits(62), WRITING, 0])
        blocks = [RDMABuffer(self.data[i : i + _BLOCK]) for i in range(0, nbytes, _BLOCK)]
        header = RDMABuffer(self._header.view(torch.uint8))
        self._location = RdmaLocation(int(self._header[0]), header, tuple(blocks), nbytes)

    def reopen(self) -> bool:
        self._header[1] = WRITING  # a reader checks the header again after reading
        return True

    def seal(self, number: int, version: int, _slots: Sequence[Slot]) -> RdmaLocation:
        self._header[2] = version
        self._header[1] = number
        return self._location

    def close(self) -> None:
        self._header[1] = WRITING
        # Not awaited: Monarch may be shutting down, and the memory goes with the process anyway.
        for block in (self._location.header, *self._location.blocks):
            block.drop()


class Inbox:
    """Copies snapshots from other hosts to this one. Must live in an actor.

    Example:
        inbox = Inbox()
        here = await inbox.fetch(handle)
        with open_snapshot(here) as snapshot:
            weights = {name: t.clone() for name, t in snapshot.tensors()}
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[ShmBuffer, int]] = {}

    async def fetch(self, handle: WeightHandle) -> WeightHandle:
        """A handle that can be opened on this host: of a copy, or the given one if none is needed.

        Blocks that have not changed since the last snapshot are not read again. If reading fails,
        the copy of the last snapshot is gone as well.
        """
        if handle.transport != "rdma":
            return handle
        if get_rdma_backend() == "tcp":
            monarch.configure(rdma_max_chunk_size_mb=_TCP_CHUNK_MB)
        parts = await together(*(self._fetch(part, handle.version) for part in handle.parts))
        # Copies from a trainer that has been replaced.
        for publisher in self._held.keys() - {part.publisher for part in parts}:
            self._held.pop(publisher)[0].close()
        return replace(handle, transport="shm", parts=tuple(parts))

    def close(self) -> None:
        for buffer, _ in self._held.values():
            buffer.close()
        self._held.clear()

    async def _fetch(self, part: Part, version: int) -> Part:
        location: RdmaLocation = part.location
        buffer, held = self._held.pop(part.publisher, (None, _NOTHING))
        if buffer is not None and not (len(buffer.data) == location.nbytes and buffer.reopen()):
            buffer.close()
            buffer = None
        if buffer is None or held > part.number:
            held = _NOTHING
        buffer = buffer or ShmBuffer(location.nbytes)
        try:
            await _check(part, version)
            reading = RDMAAction()
            for number in sorted(_changed_blocks(part, held)):
                first = number * _BLOCK
                reading.read_remote(buffer.data[first : first + _BLOCK], location.blocks[number])
            await _submitted(reading, version, _READ_SECONDS)
            await _check(part, version)  # it may have been overwritten meanwhile
        except BaseException:
            buffer.close()
            raise
        self._held[part.publisher] = (buffer, part.number)
        return replace(part, location=buffer.seal(part.number, version, part.slots))


def _changed_blocks(part: Part, held: int) -> set[int]:
    return {
        number
        for slot in part.changed_since(held)
        if slot.nbytes
        for number in range(slot.offset // _BLOCK, (slot.offset + slot.nbytes - 1) // _BLOCK + 1)
    }


async def _check(part: Part, version: int) -> None:
    """Raise StaleHandleError unless the memory holds what the handle says."""
    location: RdmaLocation = part.location
    header = torch.zeros(3, dtype=torch.int64)
    asking = RDMAAction().read_remote(header.view(torch.uint8), location.header)
    await _submitted(asking, version, _ANSWER_SECONDS)
    token, held, newer = header.tolist()
    if token != location.token:
        raise StaleHandleError(f"the buffer of policy version {version} is gone")
    if held != part.number:
        now = "being rewritten" if held == WRITING else f"holding version {newer}"
        raise StaleHandleError(
            f"policy version {version} was overwritten: its buffer is {now}; pull the latest handle"
        )


async def _submitted(action: RDMAAction, version: int, seconds: int) -> None:
    try:
        await action.submit(timeout=seconds)
    except Exception as error:
        raise WeightSyncError(
            f"policy version {version} could not be read over {get_rdma_backend()}: {error}. Is "
            "the trainer alive?"
        ) from error
