"""What is known of shards before they are published: all that does not change with their values.

A trainer's shards are the same tensors in the same memory step after step, so this is done once:
in a small model it would take longer than to copy its weights.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtitan_rl.weight_sync.copying import bytes_of
from torchtitan_rl.weight_sync.handle import Shard, Slot

_ALIGNMENT = 64
_LOOK = 64
"""Bytes of each piece that are compared first. Where weights were trained, these are enough."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where shards go in a buffer. As long as their shapes stay, it is the same object."""

    signature: list[tuple]
    slots: tuple[Slot, ...]
    owners: list[int]
    """Of each piece of a shard, the number of its slot."""
    nbytes: int

    def cut(self, data: torch.Tensor) -> list[torch.Tensor]:
        """A buffer's place for each piece, in its shape and dtype."""
        places = []
        for slot, (_, _, _, shapes, kind) in zip(self.slots, self.signature, strict=True):
            held = data[slot.offset : slot.offset + slot.nbytes].view(kind)
            pieces = held.split([math.prod(shape) for shape in shapes])
            places += [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        return places


class Plan:
    """Shards, and where their pieces go."""

    def __init__(
        self, shards: Sequence[Shard], dtype: torch.dtype | None, last: Layout | None
    ) -> None:
        self.layout = _layout(shards, dtype, last)
        self.rows = [row for shard in shards for row in shard.rows]
        kinds = [self.layout.slots[owner].dtype for owner in self.layout.owners]
        self.memory = [bytes_of(row, kind) for row, kind in zip(self.rows, kinds, strict=True)]
        """Of each piece; None if it is to be converted, or is not in CPU memory."""
        self._looks = [memoryview(b"") if m is None else m[:_LOOK].data for m in self.memory]
        self._shards, self._dtype = list(shards), dtype

    def is_of(self, shards: Sequence[Shard], dtype: torch.dtype | None) -> bool:
        """Whether these are the very same shards, which stay where they are in memory."""
        return (
            dtype == self._dtype
            and len(shards) == len(self._shards)
            and all(map(operator.is_, shards, self._shards))
        )

    def look(self) -> list[bytes]:
        """The first bytes of each piece, as they are now. None of those without `memory`."""
        return list(map(bytes, self._looks))


def _layout(shards: Sequence[Shard], dtype: torch.dtype | None, last: Layout | None) -> Layout:
    """Where each shard goes; the last layout again, if it fits."""
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
        offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return Layout(signature, tuple(slots), owners, offset)
