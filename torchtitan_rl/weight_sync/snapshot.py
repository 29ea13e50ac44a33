"""Writing snapshots: two buffers in turn, so that the trainer goes on while generators read.

Publishing version v+1 leaves v alone; v+2 reuses v's buffer, unless somebody still reads it: then
the buffer is left to its readers and a new one takes its place. No reader ever waits for the
writer, nor the writer for a reader.
"""

import ctypes
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import xxhash

from torchtitan_rl.weight_sync.handle import Part, Shard, Slot, Transport, WeightHandle

_ALIGNMENT = 64
_FIRST_LOOK, _BLOCK = 1 << 12, 1 << 20
"""Bytes compared at a time. Weights that were trained differ at the first look."""
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Buffer(Protocol):
    """Memory for one snapshot, and how others get at it. Readers keep what is closed."""

    data: torch.Tensor
    """[bytes] uint8."""

    def reopen(self) -> bool:
        """From now on it holds no version. False: it is being read, and stays as it is."""
        ...

    def seal(self, version: int, slots: Sequence[Slot]) -> Any:
        """From now on it holds this version; returns where."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Snapshot:
    """What a buffer holds: nothing, while it has no slots."""

    buffer: Buffer
    slots: dict[tuple, Slot] = field(default_factory=dict)


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
        self._transport, self._make_buffer, self._checksums = transport, make_buffer, checksums
        self._id = secrets.randbits(62)
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
            slots = _layout(shards, dtype)
            target, before = self._turn(slots), self._newer
            held, target.slots = target.slots, {}
            written = [
                _write(shard, slot, version, target.buffer.data, held, before)
                for shard, slot in zip(shards, slots, strict=True)
            ]
        finally:
            copied()
        if self._checksums and not target.buffer.data.is_cuda:
            written = self._with_checksums(written, target.buffer.data)
        location = target.buffer.seal(version, written)
        target.slots = {_key(slot): slot for slot in written}
        self._older, self._newer = self._newer, target
        return WeightHandle(version, self._transport, (Part(self._id, location, tuple(written)),))

    def _with_checksums(self, slots: list[Slot], data: torch.Tensor) -> list[Slot]:
        def complete(slot: Slot) -> Slot:
            known = slot.checksum is not None
            return slot if known else replace(slot, checksum=checksum(_bytes(data, slot)))

        return list(self._threads.map(complete, slots))

    def close(self) -> None:
        """Free the buffers. Readers that still have them open keep what they have."""
        for snapshot in (self._older, self._newer):
            if snapshot is not None:
                snapshot.buffer.close()
        self._older = self._newer = None
        self._threads.shutdown()
        self._at_close()

    def _turn(self, slots: Sequence[Slot]) -> Snapshot:
        """The snapshot to overwrite; its buffer is reopened, or new."""
        size = slots[-1].offset + slots[-1].nbytes if slots else 0
        older, self._older = self._older, None
        if older is not None:
            if len(older.buffer.data) >= size and older.buffer.reopen():
                self._older = older
                return older
            older.buffer.close()
        self._older = Snapshot(self._make_buffer(max(size, 1)))
        return self._older


def _write(
    shard: Shard,
    slot: Slot,
    version: int,
    data: torch.Tensor,
    held: dict[tuple, Slot],
    before: Snapshot | None,
) -> Slot:
    """Bring the slot of a buffer up to date, which `held` says what it has; returns it with what is
    known of its bytes: when they changed, and their checksum if they are those of `before`."""
    same = before.slots.get(_key(slot)) if before else None
    if before and same and _holds(before.buffer.data, same, shard):
        slot = replace(slot, changed=same.changed, checksum=same.checksum)
        if held.get(_key(slot)) == slot:
            return slot  # this buffer has it as well
    else:
        slot = replace(slot, changed=version)
    for target, source in _pieces(data, slot, shard):
        target.copy_(source)
    return slot


def checksum(data: torch.Tensor) -> int:
    """Of [bytes] uint8."""
    return xxhash.xxh3_64(data.numpy()).intdigest()  # type: ignore[arg-type]


def _key(slot: Slot) -> tuple:
    return (slot.name, slot.whole, slot.start, slot.shape, slot.dtype, slot.offset)


def _layout(shards: Sequence[Shard], dtype: torch.dtype | None) -> list[Slot]:
    slots, offset = [], 0
    for shard in shards:
        kind = dtype or shard.rows[0].dtype
        nbytes = sum(t.numel() for t in shard.rows) * kind.itemsize
        slots.append(Slot(shard.name, shard.whole, shard.start, shard.shape, kind, offset, nbytes))
        offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return slots


def _pieces(
    data: torch.Tensor, slot: Slot, shard: Shard
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Where each of the shard's pieces goes: pairs of flat tensors, or of the same shape."""
    offset, pairs = slot.offset, []
    for source in shard.rows:
        nbytes = source.numel() * slot.dtype.itemsize
        target = data[offset : offset + nbytes].view(slot.dtype)
        flat = source.is_contiguous()
        pairs.append((target, source.view(-1)) if flat else (target.view(source.shape), source))
        offset += nbytes
    return pairs


def _bytes(data: torch.Tensor, slot: Slot) -> torch.Tensor:
    return data[slot.offset : slot.offset + slot.nbytes]


def _holds(data: torch.Tensor, slot: Slot, shard: Shard) -> bool:
    """Whether the slot has the bytes of the live weights. Where they differ it is soon known."""
    for held, source in _pieces(data, slot, shard):
        held, source = held.reshape(-1), source.reshape(-1)
        start, step = 0, _FIRST_LOOK // held.itemsize
        while start < len(held):
            ours = held[start : start + step]
            if not _same_bytes(ours, source[start : start + step].to(held.device, held.dtype)):
                return False
            start, step = start + step, _BLOCK // held.itemsize
    return True


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_cuda:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return _memcmp(a.data_ptr(), b.data_ptr(), a.numel() * a.itemsize) == 0
