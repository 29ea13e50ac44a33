"""Ranges of bytes that a relay receives: which of them travel, and how far its memory is valid.

Ranges are [first, last) in the data of a publication, ascending, and not empty.
"""

from collections.abc import Iterable, Sequence

Range = tuple[int, int]
Slots = Sequence[tuple[int, int, int]]
"""Offset, bytes, and the number of the publication that last changed them; ascending."""


def merge_slots(slots: Iterable[tuple[int, int, int]], *, gap: int = 0) -> list[list[int]]:
    """Slots in ascending order, empty ones left out; neighbours that last changed together become
    one, with what lies between them if that is at most `gap` bytes.

    Example:
        >>> merge_slots([(64, 8, 3), (0, 60, 3), (128, 8, 1)], gap=63)
        [[0, 72, 3], [128, 8, 1]]
    """
    merged: list[list[int]] = []
    for offset, nbytes, changed in sorted(slots):
        if not nbytes:
            continue
        if merged:
            first, before, last = merged[-1]
            if last == changed and offset - (first + before) <= gap:
                merged[-1][1] = offset + nbytes - first
                continue
        merged.append([offset, nbytes, changed])
    return merged


def changed_ranges(slots: Slots, *, after: int, until: int | None = None) -> list[Range]:
    """Where bytes have changed after publication `after`, and no later than `until`; adjoining
    ranges become one.

    Example:
        >>> changed_ranges([(0, 64, 5), (64, 64, 4), (128, 64, 2)], after=3)
        [(0, 128)]
        >>> changed_ranges([(0, 64, 5), (64, 64, 4), (128, 64, 2)], after=3, until=4)
        [(64, 128)]
    """
    found: list[Range] = []
    for offset, nbytes, changed in slots:
        if not nbytes or changed <= after or (until is not None and changed > until):
            continue
        if found and found[-1][1] == offset:
            found[-1] = (found[-1][0], offset + nbytes)
        else:
            found.append((offset, offset + nbytes))
    return found


def total(ranges: Iterable[Range]) -> int:
    """Bytes that ranges have together."""
    return sum(last - first for first, last in ranges)


class Incoming:
    """Memory that is being brought up to date from its beginning to its end.

    What no range has is valid already. So all bytes before the one that comes next are: they can be
    handed on while the rest is still on its way.

    Example:
        >>> incoming = Incoming([(10, 20), (30, 40)], size=50)
        >>> incoming.valid, incoming.space
        (10, (10, 20))
        >>> incoming.take(10)
        >>> incoming.valid, incoming.space
        (30, (30, 40))
    """

    def __init__(self, ranges: Sequence[Range], size: int) -> None:
        self._ranges, self._next, self._size = ranges, 0, size
        self.valid = ranges[0][0] if ranges else size
        """How many bytes, from the first on, are as they were published."""

    @property
    def space(self) -> Range | None:
        """Where the next bytes go; None: all are there."""
        if self._next == len(self._ranges):
            return None
        return self.valid, self._ranges[self._next][1]

    def take(self, nbytes: int) -> None:
        """Count bytes that have been put at the beginning of `space`."""
        assert self.space is not None, "all bytes are there"
        first, last = self.space
        assert 0 < nbytes <= last - first, (nbytes, first, last)
        self.valid = first + nbytes
        if self.valid == last:
            self._next += 1
            done = self._next == len(self._ranges)
            self.valid = self._size if done else self._ranges[self._next][0]
