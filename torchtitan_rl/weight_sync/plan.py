"""Copy plans: everything about publishing shards that does not depend on their values.

A trainer's shards are the same tensors in the same memory at every step, so a plan is made once: in
a small model, making it takes longer than copying the weights.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torchtitan_rl.weight_sync.boxes import aligned
from torchtitan_rl.weight_sync.copying import bytes_of
from torchtitan_rl.weight_sync.handle import Shard, Slot

_PREFIX = 64
"""Bytes of each piece that are compared first: in trained weights they nearly always differ."""
Heads = tuple[torch.dtype, list[int], list[torch.Tensor]]
"""Numbers of pieces, and their first values: to be converted to a dtype, all at once."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where shards go in a buffer; the same object as long as their shapes stay."""

    signature: list[tuple]
    slots: tuple[Slot, ...]
    owners: list[int]
    """Per piece of a shard, the number of its slot."""
    nbytes: int

    def cut(self, data: torch.Tensor) -> list[torch.Tensor]:
        """Views into a buffer, one per piece, in the piece's shape and dtype."""
        views = []
        for slot, (_, _, _, shapes, kind) in zip(self.slots, self.signature, strict=True):
            held = data[slot.offset : slot.offset + slot.nbytes].view(kind)
            pieces = held.split([math.prod(shape) for shape in shapes])
            views += [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        return views


class CopyPlan:
    """Shards, and where in a buffer their pieces go."""

    def __init__(
        self, shards: Sequence[Shard], dtype: torch.dtype | None, last: Layout | None
    ) -> None:
        self.layout = _layout(shards, dtype, last)
        self.rows = [row for shard in shards for row in shard.rows]
        kinds = [self.layout.slots[owner].dtype for owner in self.layout.owners]
        self.memory = [bytes_of(row, kind) for row, kind in zip(self.rows, kinds, strict=True)]
        """Per piece, its bytes; None if it needs conversion or is not in CPU memory."""
        self._prefixes = [memoryview(b"") if m is None else m[:_PREFIX].data for m in self.memory]
        self._heads = _heads(self.rows, kinds, self.memory)
        self._shards, self._dtype = list(shards), dtype

    def is_of(self, shards: Sequence[Shard], dtype: torch.dtype | None) -> bool:
        """Whether the plan was made for exactly these shard objects and this dtype."""
        return (
            dtype == self._dtype
            and len(shards) == len(self._shards)
            and all(map(operator.is_, shards, self._shards))
        )

    def prefixes(self) -> list[bytes]:
        """The first bytes that each piece has in a snapshot made now; empty for pieces that are not
        contiguous."""
        prefixes = list(map(bytes, self._prefixes))
        for kind, numbers, heads in self._heads:
            # One copy from a device: each would wait for the device.
            read = torch.cat(heads).to(kind).view(torch.uint8).cpu().numpy().tobytes()
            first = 0
            for number, head in zip(numbers, heads, strict=True):
                last = first + head.numel() * kind.itemsize
                prefixes[number], first = read[first:last], last
        return prefixes


def _heads(
    rows: Sequence[torch.Tensor],
    kinds: Sequence[torch.dtype],
    memory: Sequence[np.ndarray | None],
) -> list[Heads]:
    """The first values of contiguous pieces that need conversion, or are not in CPU memory."""
    heads: dict[tuple, Heads] = {}
    for number, (row, kind, held) in enumerate(zip(rows, kinds, memory, strict=True)):
        if held is None and row.is_contiguous() and row.numel():
            group = heads.setdefault((row.dtype, row.device, kind), (kind, [], []))
            group[1].append(number)
            group[2].append(row.detach().view(-1)[: _PREFIX // kind.itemsize])
    return list(heads.values())


def _layout(shards: Sequence[Shard], dtype: torch.dtype | None, last: Layout | None) -> Layout:
    """Where each shard goes in a buffer: the last layout, if it fits."""
    signature = [
        (s.name, s.whole, s.start, [t.shape for t in s.rows], dtype or s.rows[0].dtype)
        for s in shards
    ]
    if last is not None and last.signature == signature:
        return last
    slots, owners, offset = [], [], 0
    for number, (name, whole, start, shapes, kind) in enumerate(signature):
        nbytes = sum(map(math.prod, shapes)) * kind.itemsize
        shape = (sum(rows[0] for rows in shapes), *shapes[0][1:]) if whole else ()
        slots.append(Slot(name, whole, start, shape, kind, offset, nbytes))
        owners += [number] * len(shapes)
        offset += aligned(nbytes)
    return Layout(signature, tuple(slots), owners, offset)
