"""Weight handles: small, picklable descriptions of where a published snapshot lies.

Tensors are never sent in actor messages, which move bytes at a twentieth of memcpy speed. Tensors
have their HF names, so any engine that loads an HF folder can read a snapshot.
"""

import functools
import itertools
import math
import pickle
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torchtitan_rl.core.errors import TorchtitanRLError

if TYPE_CHECKING:  # a simulated generator takes handles, and starts sooner without torch
    import torch

Transport = Literal["shm", "relay", "rdma", "file", "collective"]
Shape = tuple[int, ...]
_MOST_SHOWN = 8
"""Most boxes that a message lists."""


class WeightSyncError(TorchtitanRLError, RuntimeError):
    """A snapshot cannot be read; the message says which one and why."""


class StaleHandleError(WeightSyncError):
    """The snapshot of a handle has been overwritten by a later one, or is half-written."""


class WrongWeightsError(WeightSyncError):
    """A snapshot does not fit the model that loads it, or differs from what was published."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The box of a tensor that one rank owns, in this process's memory.

    Example:
        Rank 1 of two has rows 2 and 3 of a matrix of 4x8:
        Shard("w", (4, 8), start=(2, 0), rows=(local,))
    """

    name: str
    whole: Shape
    """Shape of the whole tensor."""
    start: Shape
    """Where in the whole tensor the box begins."""
    rows: "tuple[torch.Tensor, ...]"
    """Pieces of the box that follow each other along the first dimension; the trainer may keep them
    apart in memory. They are the live weights: if they move to other memory, make a new Shard."""


def whole_tensors(named: "Iterable[tuple[str, torch.Tensor]]") -> list[Shard]:
    """Shards of a process that has every tensor whole."""
    return [Shard(name, tuple(t.shape), (0,) * t.ndim, (t.detach(),)) for name, t in named]


class Slot(NamedTuple):
    """Where a box of a tensor lies in a snapshot; equal in all snapshots of the same tensors.

    A tuple, because comparing tuples is twice as fast as comparing dataclasses.
    """

    name: str
    whole: Shape
    start: Shape
    shape: Shape
    dtype: "torch.dtype"
    offset: int
    """Position of the first byte in the part."""
    nbytes: int

    @property
    def is_whole(self) -> bool:
        return self.shape == self.whole

    def __str__(self) -> str:
        box = "" if self.is_whole else f"[{', '.join(map(str, self.start))}: {self.shape}]"
        return f"{self.name}{box}"


@dataclass(frozen=True, slots=True)
class Part:
    """One trainer rank's part of a published snapshot."""

    publisher: int
    """Random id of the publisher; parts of different publishers cannot be compared."""
    number: int
    """Count of the publisher's publications; a version may be published twice, changed."""
    location: Any
    """What the transport needs to find the bytes."""
    slots: tuple[Slot, ...]
    changed: tuple[int, ...]
    """Per slot, the number of the publication that last changed its bytes."""
    checksums: tuple[int, ...] = ()
    """Per slot, a checksum of its bytes; empty without checksums."""
    _pickled: tuple[bytes, ...] = field(default=(), init=False, repr=False, compare=False)
    """The slots, and what else there is of each slot, pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled once, by the rank that made it, and not again for each generator: the controller
        # would spend more time on that than on all else. The location may need Monarch's pickler.
        if not self._pickled:
            pickled = pickle.dumps(self.slots), pickle.dumps((self.changed, self.checksums))
            object.__setattr__(self, "_pickled", pickled)
        return _unpickled, (self.publisher, self.number, self.location, *self._pickled)

    def at(self, location: Any) -> "Part":
        """A copy of this part elsewhere; what was pickled of it is kept."""
        part = replace(self, location=location)
        object.__setattr__(part, "_pickled", self._pickled)
        return part

    def changed_since(self, number: int) -> list[Slot]:
        """Slots whose bytes have changed after publication `number`."""
        return [s for s, last in zip(self.slots, self.changed, strict=True) if last > number]


def _unpickled(publisher: int, number: int, location: Any, slots: bytes, of_slots: bytes) -> Part:
    part = Part(publisher, number, location, _slots(slots), *pickle.loads(of_slots))
    object.__setattr__(part, "_pickled", (slots, of_slots))
    return part


@functools.lru_cache(maxsize=4096)
def _slots(pickled: bytes) -> tuple[Slot, ...]:
    """The slots, as the same object each time: they rarely differ between two publications, and
    to make them takes longer than to check them."""
    return pickle.loads(pickled)


@dataclass(frozen=True, slots=True)
class WeightHandle:
    """A published snapshot: small, picklable, and valid until its buffers are reused."""

    version: int
    """Policy version of the weights: the number of batches they were trained on."""
    transport: Transport
    parts: tuple[Part, ...] = ()

    @property
    def slots(self) -> list[Slot]:
        return [slot for part in self.parts for slot in part.slots]

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    @property
    def changed_bytes(self) -> int:
        """Bytes that differ from the publication before."""
        return sum(s.nbytes for part in self.parts for s in part.changed_since(part.number - 1))

    def tensors(self) -> "dict[str, tuple[Shape, torch.dtype]]":
        """Shape and dtype of every tensor, by name."""
        return {slot.name: (slot.whole, slot.dtype) for slot in self.slots}

    def follows(self, older: "WeightHandle | None") -> bool:
        """Whether tensors that this handle says are unchanged since `older` equal those of
        `older`."""
        return (
            older is not None
            and [p.publisher for p in older.parts] == [p.publisher for p in self.parts]
            and all(a.number <= b.number for a, b in zip(older.parts, self.parts, strict=True))
        )

    def changed_since(self, older: "WeightHandle | None") -> set[str]:
        """Names of the tensors that an engine with the weights of `older` has to load.

        A changed tensor brings those with it that an engine may keep as one, such as q, k and v.

        Example:
            If only model.layers.3.mlp.up_proj.weight has changed: all of model.layers.3.mlp.
        """
        if not self.follows(older):
            return {slot.name for slot in self.slots}
        assert older is not None
        modules = {
            _module(slot.name)
            for served, part in zip(older.parts, self.parts, strict=True)
            for slot in part.changed_since(served.number)
        }
        return {slot.name for slot in self.slots if _module(slot.name) in modules}


def _module(name: str) -> str:
    """The module that an engine loads as a whole: attention or MLP of a layer, else the tensor.

    Example:
        >>> _module("model.layers.3.mlp.experts.7.up_proj.weight")
        'model.layers.3.mlp'
        >>> _module("model.norm.weight")
        'model.norm.weight'
    """
    before, layers, after = name.partition(".layers.")
    return ".".join([before, layers[1:-1], *after.split(".")[:2]]) if layers else name


def merge_handles(
    ranks: Sequence[WeightHandle], *, last: WeightHandle | None = None
) -> WeightHandle:
    """One handle for the parts of all ranks; together they must be every tensor, whole. With the
    slots of `last`, which was merged before, they are: nothing else is looked at then."""
    first = ranks[0]
    for rank in ranks:
        if (rank.version, rank.transport) != (first.version, first.transport):
            raise WeightSyncError(
                f"trainer ranks disagree: one has published version {first.version} by "
                f"{first.transport}, another {rank.version} by {rank.transport}"
            )
    merged = replace(first, parts=tuple(part for rank in ranks for part in rank.parts))
    if last is not None and _same_slots(merged, last):
        return merged
    boxes: defaultdict[str, list[Slot]] = defaultdict(list)
    for part in merged.parts:
        for slot in part.slots:
            boxes[slot.name].append(slot)
    for name, slots in boxes.items():
        _check_cover(name, slots)
    return merged


def _same_slots(one: WeightHandle, other: WeightHandle) -> bool:
    return len(one.parts) == len(other.parts) and all(
        a.slots is b.slots for a, b in zip(one.parts, other.parts, strict=True)
    )


def _check_cover(name: str, slots: list[Slot]) -> None:
    """Raise WrongWeightsError unless the boxes of a tensor cover each element exactly once."""
    whole, dtype = slots[0].whole, slots[0].dtype
    if any(slot.whole != whole or slot.dtype != dtype for slot in slots):
        raise WrongWeightsError(f"trainer ranks disagree on shape or dtype of {name!r}")
    if _covers(whole, slots):
        return
    published = sum(math.prod(slot.shape) for slot in slots)
    shown, more = slots[:_MOST_SHOWN], len(slots) - _MOST_SHOWN
    raise WrongWeightsError(
        f"{name!r} has {math.prod(whole)} elements, and the trainer ranks have published "
        f"{published} of them, in boxes that do not fit: {', '.join(map(str, shown))}"
        f"{f' and {more} more' if more > 0 else ''}"
    )


def _covers(whole: Shape, slots: Sequence[Slot]) -> bool:
    """Whether the boxes cover each element exactly once.

    Corners of a box count for it or against it, in turn. Where boxes adjoin, their corners cancel;
    so the boxes are the whole if all that is left are the corners of the whole. That takes a pass
    over the boxes, where comparing them in pairs takes minutes for a thousand ranks.

    Example:
        Rows 0 to 2 and 2 to 4: for 0 and 2, against 2 and 4. Rows 0 to 4: for 0, against 4.
    """
    # Most tensors are split along one dimension: corners along the others are the same for all.
    split = [
        dim
        for dim, size in enumerate(whole)
        if any(slot.shape[dim] != size or slot.start[dim] for slot in slots)
    ]
    if not split:
        return len(slots) == 1
    edges = [
        ([slot.start[dim] for slot in slots], [slot.start[dim] + slot.shape[dim] for slot in slots])
        for dim in split
    ]
    counts: tuple[Counter[Shape], Counter[Shape]] = Counter(), Counter()
    for ends in itertools.product((0, 1), repeat=len(split)):
        sign = sum(ends) % 2
        corners = (edge[end] for edge, end in zip(edges, ends, strict=True))
        counts[sign].update(zip(*corners, strict=True))
        corner_of_whole = tuple(end * whole[dim] for end, dim in zip(ends, split, strict=True))
        counts[1 - sign][corner_of_whole] += 1
    return dict(counts[0]) == dict(counts[1])  # Counter's own comparison is a loop in Python
