"""Writing snapshots: two buffers in turn, so that the trainer goes on while generators read.

Publishing version v+1 leaves v alone; v+2 reuses v's buffer, unless somebody still reads it: then
the buffer is left to its readers and a new one takes its place. No reader ever waits for the
writer, nor the writer for a reader.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash

from torchtitan_rl.weight_sync.copying import Copy, address, copy, same
from torchtitan_rl.weight_sync.handle import Part, Shard, Slot, Transport, WeightHandle

_ALIGNMENT = 64
_FIRST_LOOK = 1024


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
class Place:
    """Where a piece of a shard goes in a buffer."""

    view: torch.Tensor
    address: int
    """0 if it is not CPU memory."""
    nbytes: int


@dataclass(slots=True)
class Snapshot:
    """A buffer, cut into places for the pieces of every shard."""

    buffer: Buffer
    layout: Layout
    places: list[list[Place]]
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
        self._threads, self._pool = threads, ThreadPoolExecutor(threads, "weights")
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
            unchanged = self._copy(shards, target)
        finally:
            copied()
        written = [
            place.changed_with(self._number) if slot is None else slot
            for place, slot in zip(layout.slots, unchanged, strict=True)
        ]
        if self._checksums:
            written = self._with_checksums(written, target.buffer.data)
        location = target.buffer.seal(self._number, version, written)
        target.slots = written
        self._older, self._newer = self._newer, target
        part = Part(self._id, self._number, location, tuple(written))
        return WeightHandle(version, self.transport, (part,))

    def _copy(self, shards: Sequence[Shard], target: Snapshot) -> list[Slot | None]:
        """Bring a snapshot up to date. Returns the slots whose bytes are as last published, and
        None where they are not."""
        before = self._newer if self._newer and self._newer.layout is target.layout else None
        held, target.slots = target.slots, None
        unchanged: list[Slot | None] = []
        copies: list[Copy] = []
        # What is to be converted, or is not in CPU memory.
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for number, (shard, slot) in enumerate(zip(shards, target.layout.slots, strict=True)):
            live = [(row, address(row, slot.dtype)) for row in shard.rows]
            last = None
            if before and before.slots and _same(before.places[number], live):
                last = before.slots[number]
            unchanged.append(last)
            if last and held and held[number] == last:
                continue  # this buffer has it as well
            for place, (row, source) in zip(target.places[number], live, strict=True):
                if place.address and source:
                    copies.append((place.address, source, place.nbytes))
                else:
                    targets.append(place.view)
                    sources.append(row)
        copy(copies, self._pool, self._threads)
        if targets:
            torch._foreach_copy_(targets, sources)
        return unchanged

    def _with_checksums(self, slots: list[Slot], data: torch.Tensor) -> list[Slot]:
        def complete(slot: Slot) -> Slot:
            known = slot.checksum is not None
            return slot if known else slot._replace(checksum=checksum(_bytes(data, slot)))

        return list(self._pool.map(complete, slots))

    def close(self) -> None:
        """Free the buffers. Readers that still have them open keep what they have."""
        for snapshot in (self._older, self._newer):
            if snapshot is not None:
                snapshot.places.clear()
                snapshot.buffer.close()
        self._older = self._newer = None
        self._pool.shutdown()
        self._at_close()

    def _turn(self, layout: Layout) -> Snapshot:
        """The snapshot to overwrite: the older of the two, or a new one."""
        older, self._older = self._older, None
        if older is not None:
            if older.layout is layout and older.buffer.reopen():
                self._older = older
                return older
            older.places.clear()
            older.buffer.close()
        buffer = self._make_buffer(max(layout.nbytes, 1))
        self._older = Snapshot(buffer, layout, _places(buffer.data, layout))
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


def _places(data: torch.Tensor, layout: Layout) -> list[list[Place]]:
    """The buffer's place for each piece of each shard."""
    places = []
    for slot, (_, _, _, shapes, kind) in zip(layout.slots, layout.signature, strict=True):
        pieces = _bytes(data, slot).view(kind).split([math.prod(shape) for shape in shapes])
        views = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        places.append([Place(v, address(v, kind), v.numel() * v.itemsize) for v in views])
    return places


def _same(held: Sequence[Place], live: Sequence[tuple[torch.Tensor, int]]) -> bool:
    """Whether a snapshot has the bytes of the live weights. Where they differ it is soon known."""
    for place, (row, source) in zip(held, live, strict=True):
        if place.address and source:
            if not same(place.address, source, place.nbytes):
                return False
        elif not _same_values(place.view, row):
            return False
    return True


def _same_values(held: torch.Tensor, live: torch.Tensor) -> bool:
    """The same of weights that are to be converted, or are not in CPU memory."""
    held, live = held.reshape(-1), live.reshape(-1)
    # Not all of it where a look is enough: converting it takes as long as copying it.
    return all(
        _equal(held[first:last], live[first:last].to(held.device, held.dtype))
        for first, last in ((0, _FIRST_LOOK), (_FIRST_LOOK, len(held)))
    )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_cuda:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return same(a.data_ptr(), b.data_ptr(), a.numel() * a.itemsize)  # it knows no NaN
