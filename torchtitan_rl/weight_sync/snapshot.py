"""Writing snapshots: two buffers in turn, so that the trainer goes on while generators read.

Publishing version v+1 leaves v alone; v+2 reuses v's buffer, unless somebody still reads it: then
the buffer is left to its readers and a new one takes its place. No reader ever waits for the
writer, nor the writer for a reader.
"""

import operator
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from torchtitan_rl.weight_sync.copying import Copy, bytes_of, copy, same
from torchtitan_rl.weight_sync.handle import Part, Shard, Slot, Transport, WeightHandle
from torchtitan_rl.weight_sync.plan import Layout, Plan

_FIRST_VALUES = 1024
"""Of weights that are to be converted: so many are compared before all of them are."""


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


@dataclass(slots=True)
class Snapshot:
    """A buffer, cut into places for the pieces of every shard, and what it holds."""

    buffer: Buffer
    layout: Layout
    places: list[torch.Tensor]
    memory: list[np.ndarray | None]
    """Of each place; None if it is not CPU memory."""
    changed: list[int] = field(default_factory=list)
    """As in `Part`; empty while what it holds is not whole."""
    checksums: list[int] = field(default_factory=list)
    looks: list[bytes] = field(default_factory=list)
    """`Plan.look` of what it holds; empty if that was another plan's."""

    def close(self) -> None:
        self.places.clear()
        self.memory.clear()
        self.buffer.close()


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
        self._plan: Plan | None = None
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
            plan = self._plan
            if plan is None or not plan.is_of(shards, dtype):
                self._plan = plan = Plan(shards, dtype, plan.layout if plan else None)
                if self._newer:
                    self._newer.looks.clear()  # other pieces may have one now
            target = self._turn(plan.layout)
            self._number += 1
            changed = self._copy(plan, target)
        finally:
            copied()
        if self._checksums:
            target.checksums = self._sums(target, changed)
        slots = plan.layout.slots
        location = target.buffer.seal(self._number, version, slots)
        target.changed = changed
        self._older, self._newer = self._newer, target
        sums = tuple(target.checksums)
        part = Part(self._id, self._number, location, slots, tuple(changed), sums)
        return WeightHandle(version, self.transport, (part,))

    def _before(self, layout: Layout) -> Snapshot | None:
        """What was last published, if it can be compared with what is laid out like this."""
        return self._newer if self._newer and self._newer.layout is layout else None

    def _copy(self, plan: Plan, target: Snapshot) -> list[int]:
        """Bring a snapshot up to date. Returns with which publication each slot has changed."""
        held, target.changed = target.changed, []
        target.looks = plan.look()
        changed = self._changed(plan, target.looks)
        # What the snapshot holds is left as it is where it has not changed since.
        stale = list(map(operator.ne, held, changed)) if held else [True] * len(changed)
        copies: list[Copy] = []
        # What is to be converted, or is not in CPU memory.
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        pieces = zip(
            plan.layout.owners, target.memory, plan.memory, target.places, plan.rows, strict=True
        )
        for owner, to, of, place, row in pieces:
            if not stale[owner]:
                continue
            if to is not None and of is not None:
                copies.append((to, of))
            else:
                targets.append(place)
                sources.append(row)
        copy(copies, self._pool, self._threads)
        if targets:
            torch._foreach_copy_(targets, sources)
        return changed

    def _changed(self, plan: Plan, looks: list[bytes]) -> list[int]:
        """Of each slot, with which publication its bytes have changed: this one, if they are not
        those that were published last. Where they differ, a look most often tells."""
        before, owners = self._before(plan.layout), plan.layout.owners
        changed = [self._number] * len(plan.layout.slots)
        if before is None:
            return changed
        known = before.looks or looks
        if not any(map(operator.eq, looks, known)):
            return changed
        differ: set[int] = set()
        for piece, owner in enumerate(owners):
            if owner not in differ and not (
                looks[piece] == known[piece] and _same(before, plan, piece)
            ):
                differ.add(owner)
        return [
            self._number if slot in differ else last for slot, last in enumerate(before.changed)
        ]

    def _sums(self, target: Snapshot, changed: list[int]) -> list[int]:
        """The checksum of each slot; of what has not changed it is known."""
        before, data = self._before(target.layout), target.buffer.data

        def of(n: int) -> int:
            if before and changed[n] != self._number:
                return before.checksums[n]
            slot = target.layout.slots[n]
            return checksum(data[slot.offset : slot.offset + slot.nbytes])

        return list(self._pool.map(of, range(len(changed))))

    def close(self) -> None:
        """Free the buffers. Readers that still have them open keep what they have."""
        for snapshot in (self._older, self._newer):
            if snapshot is not None:
                snapshot.close()
        self._older = self._newer = self._plan = None
        self._pool.shutdown()
        self._at_close()

    def _turn(self, layout: Layout) -> Snapshot:
        """The snapshot to overwrite: the older of the two, or a new one."""
        older, self._older = self._older, None
        if older is not None:
            if older.layout is layout and older.buffer.reopen():
                self._older = older
                return older
            older.close()
        buffer = self._make_buffer(max(layout.nbytes, 1))
        places = layout.cut(buffer.data)
        self._older = Snapshot(buffer, layout, places, [bytes_of(p, p.dtype) for p in places])
        return self._older


def checksum(data: torch.Tensor) -> int:
    """Of [bytes] uint8."""
    return xxhash.xxh3_64(data.cpu().numpy()).intdigest()  # type: ignore[arg-type]


def _same(held: Snapshot, plan: Plan, piece: int) -> bool:
    """Whether a snapshot has the bytes of a piece of the live weights."""
    one, other = held.memory[piece], plan.memory[piece]
    if one is None or other is None:
        return _same_values(held.places[piece], plan.rows[piece])
    return same(one, other)


def _same_values(held: torch.Tensor, live: torch.Tensor) -> bool:
    """The same of weights that are to be converted, or are not in CPU memory."""
    held, live = held.reshape(-1), live.reshape(-1)
    # Not all of it where a look is enough: converting it takes as long as copying it.
    return all(
        _equal(held[first:last], live[first:last].to(held.device, held.dtype))
        for first, last in ((0, _FIRST_VALUES), (_FIRST_VALUES, len(held)))
    )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_cuda:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return same(a.view(torch.uint8).numpy(), b.view(torch.uint8).numpy())  # it knows no NaN
