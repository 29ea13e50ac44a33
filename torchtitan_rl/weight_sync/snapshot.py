"""Writing snapshots: two buffers in turn, so that the trainer goes on while generators read.

Publishing version v+1 does not touch v. Publishing v+2 reuses v's buffer, unless it is still being
read: then its readers keep it and a new buffer takes its place. No reader ever waits for the
writer, and the writer never waits for a reader.
"""

import operator
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from torchtitan_rl.weight_sync.copying import Copy, bytes_of, checksum, copy, same
from torchtitan_rl.weight_sync.handle import Part, Shard, Slot, Transport, WeightHandle
from torchtitan_rl.weight_sync.plan import CopyPlan, Layout
from torchtitan_rl.weight_sync.side_stream import SideStream, copy_over

_FIRST_VALUES = 1024
"""How many values of a converted tensor are compared before all of them are."""


class Buffer(Protocol):
    """Memory for one snapshot that readers can open; closing it leaves open readers theirs."""

    data: torch.Tensor
    """[bytes] uint8."""

    def reopen(self) -> bool:
        """Mark the buffer as holding no version. False: it is being read, and stays unchanged."""
        ...

    def seal(self, number: int, version: int, slots: Sequence[Slot]) -> Any:
        """Mark the buffer as holding publication `number` of `version`; returns its location."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Snapshot:
    """A buffer, cut into views for the pieces of every shard, and what it holds."""

    buffer: Buffer
    layout: Layout
    views: list[torch.Tensor]
    memory: list[np.ndarray | None]
    """Per view, its bytes; None if it is not CPU memory."""
    changed: list[int] = field(default_factory=list)
    """`Part.changed` of what the buffer holds; empty while that is incomplete."""
    checksums: list[int] = field(default_factory=list)
    prefixes: list[bytes] = field(default_factory=list)
    """`CopyPlan.prefixes` of what the buffer holds; empty if another plan wrote it."""

    def close(self) -> None:
        self.views.clear()
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
        device: torch.device | None = None,
        checksums: bool = True,
        threads: int = 1,
        at_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`device` is where the weights are; None: in CPU memory."""
        self.transport, self._make_buffer, self._checksums = transport, make_buffer, checksums
        self._side = SideStream(device or torch.device("cpu"))
        self._id, self._number = secrets.randbits(62), 0
        self._plan: CopyPlan | None = None
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
        mark: Any = None,
        copied: Callable[[], None] = lambda: None,
    ) -> WeightHandle:
        """Write a snapshot of the shards, in `dtype` or their own.

        A device copies them beside the kernels that were queued after `mark`, or after this call
        began. `copied` is called as soon as the live weights may change again; a snapshot that is
        written to a file takes longer than that.
        """
        if version < 0:
            raise ValueError(f"policy versions start at 0, got {version}")
        mark = self.mark() if mark is None else mark
        try:
            plan = self._plan
            if plan is None or not plan.is_of(shards, dtype):
                self._plan = plan = CopyPlan(shards, dtype, plan.layout if plan else None)
                if self._newer:
                    self._newer.prefixes.clear()  # other pieces may have a prefix now
            target = self._next_snapshot(plan.layout)
            self._number += 1
            with self._side.after(mark):
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

    def mark(self) -> Any:
        """What the device has to do before the weights may be copied: all that this thread has
        queued so far."""
        return self._side.mark()

    def _before(self, layout: Layout) -> Snapshot | None:
        """The last published snapshot, if it has the same layout and so can be compared."""
        return self._newer if self._newer and self._newer.layout is layout else None

    def _copy(self, plan: CopyPlan, target: Snapshot) -> list[int]:
        """Bring a snapshot up to date. Returns, per slot, which publication last changed it."""
        held, target.changed = target.changed, []
        target.prefixes = plan.prefixes()
        changed = self._changed(plan, target.prefixes)
        # A slot that has not changed since the snapshot was written is not copied again.
        stale = list(map(operator.ne, held, changed)) if held else [True] * len(changed)
        copies: list[Copy] = []
        # Pieces that need conversion, or are not in CPU memory.
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        pieces = zip(
            plan.layout.owners, target.memory, plan.memory, target.views, plan.rows, strict=True
        )
        for owner, to, of, view, row in pieces:
            if not stale[owner]:
                continue
            if to is not None and of is not None:
                copies.append((to, of))
            else:
                targets.append(view)
                sources.append(row)
        copy(copies, self._pool, self._threads)
        if targets:
            copy_over(targets, sources)
        return changed

    def _changed(self, plan: CopyPlan, prefixes: list[bytes]) -> list[int]:
        """Per slot, which publication last changed its bytes: the current one, if they differ from
        the last snapshot. Prefixes are compared first, and nearly always decide."""
        before, owners = self._before(plan.layout), plan.layout.owners
        changed = [self._number] * len(plan.layout.slots)
        if before is None:
            return changed
        known = before.prefixes or prefixes
        if not any(map(operator.eq, prefixes, known)):
            return changed
        differ: set[int] = set()
        for piece, owner in enumerate(owners):
            if owner not in differ and not (
                prefixes[piece] == known[piece] and _same(before, plan, piece)
            ):
                differ.add(owner)
        return [
            self._number if slot in differ else last for slot, last in enumerate(before.changed)
        ]

    def _sums(self, target: Snapshot, changed: list[int]) -> list[int]:
        """The checksum of each slot; computed only for slots that have changed."""
        before, data = self._before(target.layout), target.buffer.data

        def of(n: int) -> int:
            if before and changed[n] != self._number:
                return before.checksums[n]
            slot = target.layout.slots[n]
            return checksum(data[slot.offset : slot.offset + slot.nbytes])

        return list(self._pool.map(of, range(len(changed))))

    def close(self) -> None:
        """Free the buffers. Readers that have them open can go on reading."""
        for snapshot in (self._older, self._newer):
            if snapshot is not None:
                self._close(snapshot)
        self._older = self._newer = self._plan = None
        self._pool.shutdown()
        self._at_close()

    def _next_snapshot(self, layout: Layout) -> Snapshot:
        """The snapshot to overwrite: the older of the two, or a new one."""
        older, self._older = self._older, None
        if older is not None:
            if older.layout is layout and older.buffer.reopen():
                self._older = older
                return older
            self._close(older)
        buffer = self._make_buffer(max(layout.nbytes, 1))
        self._side.pin(buffer.data)
        views = layout.cut(buffer.data)
        self._older = Snapshot(buffer, layout, views, [bytes_of(v, v.dtype) for v in views])
        return self._older

    def _close(self, snapshot: Snapshot) -> None:
        self._side.unpin(snapshot.buffer.data)
        snapshot.close()


def _same(held: Snapshot, plan: CopyPlan, piece: int) -> bool:
    """Whether a snapshot has the bytes of a piece of the live weights."""
    one, other = held.memory[piece], plan.memory[piece]
    if one is None or other is None:
        return _same_values(held.views[piece], plan.rows[piece])
    return same(one, other)


def _same_values(held: torch.Tensor, live: torch.Tensor) -> bool:
    """Whether a snapshot's values equal live weights, once these are converted and moved to it."""
    held, live = held.reshape(-1), live.reshape(-1)
    # The first values mostly decide; converting all of them takes as long as copying them.
    return all(
        _equal(held[first:last], live[first:last].to(held.device, held.dtype))
        for first, last in ((0, _FIRST_VALUES), (_FIRST_VALUES, len(held)))
    )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_cuda:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return same(
        a.view(torch.uint8).numpy(), b.view(torch.uint8).numpy()
    )  # by bytes: NaN equals NaN
