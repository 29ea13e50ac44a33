"""Boxes of tensors, and how those that a reader wants are laid out in messages.

Trainer rank and reader make the same messages of the same slots and pieces, each by itself: what
is sent needs no description of its own.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from torchtitan_rl.weight_sync.handle import Shape, Slot

ALIGNMENT = 64
"""Bytes; tensors of any dtype begin at multiples of it."""
MESSAGE = 64 << 20
"""Most bytes of a message that is put together of several pieces."""


class Box(NamedTuple):
    """Part of a tensor, by its place in the whole tensor."""

    start: Shape
    shape: Shape


def slot_box(slot: Slot) -> Box:
    """The box that a slot holds."""
    return Box(slot.start, slot.shape)


def slot_tensor(data: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The tensor of a slot, in [bytes] uint8 that hold it."""
    held = data[slot.offset : slot.offset + slot.nbytes]
    return held.view(slot.dtype).view(slot.shape)


def common(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor have in common; None if that is nothing.

    Example:
        >>> common(Box((0, 0), (4, 8)), Box((2, 4), (4, 8)))
        Box(start=(2, 4), shape=(2, 4))
        >>> common(Box((0,), (4,)), Box((4,), (4,)))
    """
    start = tuple(map(max, a.start, b.start))
    ends = (min(x + m, y + n) for x, m, y, n in zip(*a, *b, strict=True))
    shape = tuple(end - first for first, end in zip(start, ends, strict=True))
    return Box(start, shape) if all(size > 0 for size in shape) else None


def cut(tensor: torch.Tensor, outer: Box, inner: Box) -> torch.Tensor:
    """The view of `inner` in a tensor that holds `outer`."""
    for dim, (first, size) in enumerate(zip(inner.start, inner.shape, strict=True)):
        tensor = tensor.narrow(dim, first - outer.start[dim], size)
    return tensor


class Piece(NamedTuple):
    """A box of one slot."""

    slot: int
    """Number of the slot in its part."""
    box: Box


@dataclass(slots=True)
class Message:
    """Bytes that are sent as one: a run of the buffer as it is, or pieces packed one by one."""

    first: int | None
    """Where the run begins in the buffer; None: the pieces are packed."""
    nbytes: int = 0
    pieces: list[int] = field(default_factory=list)
    """Numbers of the pieces that it has."""
    positions: list[int] = field(default_factory=list)
    """Where in the message each of them begins."""

    def takes(self, first: int | None, nbytes: int) -> bool:
        """Whether a further piece can be sent with those that the message has."""
        end = aligned(self.nbytes)
        if (first is None) != (self.first is None) or end + nbytes > MESSAGE:
            return False
        return first is None or self.first is None or first == self.first + end

    def add(self, piece: int, nbytes: int) -> None:
        """Put a piece at the end."""
        self.pieces.append(piece)
        self.positions.append(aligned(self.nbytes))
        self.nbytes = aligned(self.nbytes) + nbytes


def lay_out(slots: Sequence[Slot], pieces: Iterable[Piece]) -> list[Message]:
    """The messages by which pieces of a part are sent; empty pieces are in none.

    Whole tensors that follow each other in the buffer are sent as they lie there; so are rows of
    one. Columns are packed.
    """
    messages: list[Message] = []
    for number, (slot_number, box) in enumerate(pieces):
        slot = slots[slot_number]
        nbytes = math.prod(box.shape) * slot.dtype.itemsize
        if not nbytes:
            continue
        first = _first_byte(slot, box)
        if not messages or not messages[-1].takes(first, nbytes):
            messages.append(Message(first))
        messages[-1].add(number, nbytes)
    return messages


def _first_byte(slot: Slot, box: Box) -> int | None:
    """Where a box of a slot begins in the buffer, if it lies there in one run."""
    if box.shape[1:] != slot.shape[1:]:
        return None
    if not slot.shape:
        return slot.offset
    row = math.prod(slot.shape[1:]) * slot.dtype.itemsize
    return slot.offset + (box.start[0] - slot.start[0]) * row


def aligned(nbytes: int) -> int:
    """The next multiple of the alignment.

    Example:
        >>> aligned(65)
        128
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def place(messages: Sequence[Message]) -> tuple[list[int], int]:
    """Where each message begins in the memory that all of them are received in, and its size."""
    starts, end = [], 0
    for message in messages:
        starts.append(end)
        end += aligned(message.nbytes)
    return starts, end
