"""Writing snapshots: two buffers in turn, so that the trainer goes on while generators read.

Publishing version v+1 leaves v alone; v+2 reuses v's buffer, unless somebody still reads it: then
the buffer is left to its readers and a new one takes its place. No reader ever waits for the
writer, nor the writer for a reader.
"""

import ctypes
import math
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import xxhash

from torchtitan_rl.weight_sync.handle import Part, Shard, Slot, Transport, WeightHandle

_ALIGNMENT = 64
_FIRST_LOOK = 1024
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Buffer(Protocol):
    """Memory for one snapshot, and how others get at it. Readers keep what is closed."""

    data: torch.Tensor
    """[bytes] uint8."""

    def reopen(self) -> bool:
        """From now on it holds no version. False: it is being read, and stays as it is."""
        ...

    def seal(self, number: int, version: int, slots: Sequence[Slot]) -> Any:
        """From now on it holds publication `number`, of this version; returns where."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Layout:
    """Where shards go in a buffer. As long as their shapes stay, it is the same object."""

    signature: list[tuple]
    slots: list[Slot]
    nbytes: int


@dataclass(slots=True)
class Snapshot:
    """A buffer, cut into views for the pieces of every shard."""

    buffer: Buffer
    layout: Layout
    views: list[list[torch.Tensor]]
    slots: list[Slot] | None = None
    """What it holds; None while that is not whole."""


class Publisher:
    """Writes snapshots of a rank's weights.

    Example:
        >>> publisher = make_publisher("shm")
        >>> handle = publisher.publish(whole_tensors([("w", torch.ones(2))]), version=1)
        >>> with open_snapshot(handle) as snapshot:
        ...     [(name, t.tolist()) for name, t in snapshot.tensors()]
        [('w', [1.0, 1.0])]
    """

    def __init__(
        self,
        transport: Transport,
        make_buffer: Callable[[int], Buffer],
        *,
        checksums: bool = True,
        threads: int = 1,
        at_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.transport, self._make_buffer, self._checksums = transport, make_buffer, checksums
        self._id, self._number = secrets.randbits(62), 0
        self._layout: Layout | None = None
        self._older: Snapshot | None = None
        self._newer: Snapshot | None = None
        self._threads = ThreadPoolExecutor(threads, "weights")
        self._at_close = at_close

    def publish(
        self,
        shards: Sequence[Shard],
        version: int,
        *,
        dtype: torch.dtype | None = None,
        copied: Callable[[], None] = lambda: None,
    ) -> WeightHandle:
        """A snapshot of the shards, in `dtype` or their own. `copied` is called as soon as the live
        weights may change again; the snapshot may take longer, if it is written to a file."""
        if version < 0:
            raise ValueError(f"policy versions start at 0, got {version}")
        try:
            self._layout = layout = _layout(shards, dtype, self._layout)
            target = self._turn(layout)
            self._number += 1
            written = self._copy(shards, target)
        finally:
            copied()
        if self._checksums:
            written = self._with_checksums(written, target.buffer.data)
        location = target.buffer.seal(self._number, version, written)
        target.slots = written
        self._older, self._newer = self._newer, target
        part = Part(self._id, self._number, location, tuple(written))
        return WeightHandle(version, self.transport, (part,))

    def _copy(self, shards: Sequence[Shard], target: Snapshot) -> list[Slot]:
        """Bring a snapshot up to date. The slots say when their bytes last changed."""
        before = self._newer if self._newer and self._newer.layout is target.layout else None
        held, target.slots = target.slots, None
        slots: list[Slot] = []
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for number, (shard, slot) in enumerate(zip(shards, target.layout.slots, strict=True)):
            if before and before.slots and _same(before.views[number], shard.rows):
                slot = before.slots[number]
                if held and held[number] == slot:
                    slots.append(slot)
                    continue  # this buffer has it as well
            else:
                slot = replace(slot, changed=self._number)
            slots.append(slot)
            targets += target.views[number]
            sources += shard.rows
        if targets:
            torch._foreach_copy_(targets, sources)
        return slots

    def _with_checksums(self, slots: list[Slot], data: torch.Tensor) -> list[Slot]:
        def complete(slot: Slot) -> Slot:
            known = slot.checksum is not None
            return slot if known else replace(slot, checksum=checksum(_bytes(data, slot)))

        return list(self._threads.map(complete, slots))

    def close(self) -> None:
        """Free the buffers. Readers that still have them open keep what they have."""
        for snapshot in (self._older, self._newer):
            if snapshot is not None:
                snapshot.views.clear()
                snapshot.buffer.close()
        self._older = self._newer = None
        self._threads.shutdown()
        self._at_close()

    def _turn(self, layout: Layout) -> Snapshot:
        """The snapshot to overwrite: the older of the two, or a new one."""
        older, self._older = self._older, None
        if older is not None:
            if older.layout is layout and older.buffer.reopen():
                self._older = older
                return older
            older.views.clear()
            older.buffer.close()
        buffer = self._make_buffer(max(layout.nbytes, 1))
        self._older = Snapshot(buffer, layout, _views(buffer.data, layout))
        return self._older


def checksum(data: torch.Tensor) -> int:
    """Of [bytes] uint8."""
    return xxhash.xxh3_64(data.cpu().numpy()).intdigest()  # type: ignore[arg-type]


def _bytes(data: torch.Tensor, slot: Slot) -> torch.Tensor:
    return data[slot.offset : slot.offset + slot.nbytes]


def _layout(shards: Sequence[Shard], dtype: torch.dtype | None, last: Layout | None) -> Layout:
    """Where each shard goes; the last layout again, if it fits."""
    signature = [
        (s.name, s.whole, s.start, [t.shape for t in s.rows], dtype or s.rows[0].dtype)
        for s in shards
    ]
    if last is not None and last.signature == signature:
        return last
    slots, offset = [], 0
    for name, whole, start, shapes, kind in signature:
        nbytes = sum(map(math.prod, shapes)) * kind.itemsize
        shape = (sum(rows[0] for rows in shapes), *shapes[0][1:]) if whole else ()
        slots.append(Slot(name, whole, start, shape, kind, offset, nbytes))
        offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return Layout(signature, slots, offset)


def _views(data: torch.Tensor, layout: Layout) -> list[list[torch.Tensor]]:
    """The buffer's place for each piece of each shard."""
    views = []
    for slot, (_, _, _, shapes, kind) in zip(layout.slots, layout.signature, strict=True):
        pieces = _bytes(data, slot).view(kind).split([math.prod(shape) for shape in shapes])
        views.append([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)])
    return views


def _same(held: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> bool:
    """Whether a snapshot has the bytes of the live weights. Where they differ it is soon known."""
    return all(_same_bytes(h, r) for h, r in zip(held, rows, strict=True))


def _same_bytes(held: torch.Tensor, live: torch.Tensor) -> bool:
    if live.dtype != held.dtype or live.device != held.device or not live.is_contiguous():
        held, live = held.reshape(-1), live.reshape(-1)
        # Not all of it where a look is enough: converting it takes as long as copying it.
        return all(
            _equal(held[first:last], live[first:last].to(held.device, held.dtype))
            for first, last in ((0, _FIRST_LOOK), (_FIRST_LOOK, len(held)))
        )
    return _equal(held, live)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_cuda:
        return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    # Ends at the first difference, and knows no NaN.
    return _memcmp(a.data_ptr(), b.data_ptr(), a.numel() * a.itemsize) == 0
