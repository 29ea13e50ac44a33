"""Reading snapshots: everything is checked before the first tensor is returned."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Protocol

import torch

from torchtitan_rl.weight_sync.boxes import Box, common, cut, slot_box
from torchtitan_rl.weight_sync.copying import checksum
from torchtitan_rl.weight_sync.file import FileReader
from torchtitan_rl.weight_sync.handle import (
    Part,
    Shape,
    Slot,
    WeightHandle,
    WeightSyncError,
    WrongWeightsError,
)
from torchtitan_rl.weight_sync.receiving import CollectiveReader, Wanted
from torchtitan_rl.weight_sync.shm import ShmReader

_RANKS_AT_ONCE = 8
"""Most trainer ranks that a process receives from at once."""


class PartReader(Protocol):
    """Open part of a snapshot: what one trainer rank has published."""

    received: int
    """Bytes that were sent to this process for it."""

    def tensor_of(self, number: int) -> torch.Tensor:
        """The tensor of a slot, by the slot's number; valid until the reader is closed."""
        ...

    def box_of(self, number: int, box: Box) -> torch.Tensor:
        """A box of a slot's tensor, by its place in the whole tensor."""
        ...

    def checked(self, number: int) -> list[tuple[torch.Tensor, int]]:
        """Tensors that make up what is here of a slot, and the checksum of each."""
        ...

    def close(self) -> None: ...


Held = tuple[Slot, PartReader, int]
"""Part of a tensor: its slot, the reader that has it, and the slot's number there."""


def open_snapshot(handle: WeightHandle, wanted: Wanted | None = None) -> "OpenSnapshot":
    """Open the snapshot of a handle; it cannot change while it is open. By `collective` it is
    received first, or what is wanted of it.

    Raises StaleHandleError if it has been overwritten, WeightSyncError if it cannot be reached.
    """
    if handle.transport == "rdma":
        raise WeightSyncError(
            "a snapshot of the `rdma` transport is in another process: read it inside an actor, "
            "with `await rdma.Inbox().fetch(handle)`, and open what that returns"
        )
    if handle.transport == "collective":
        return OpenSnapshot(handle, _received(handle, wanted or Wanted()))
    make: Callable[[Part, int], PartReader]
    # The bytes of `relay` are in shared memory: the trainer's, or what `spread` has made of it.
    make = FileReader if handle.transport == "file" else ShmReader
    readers: list[PartReader] = []
    try:
        for part in handle.parts:
            readers.append(make(part, handle.version))
    except BaseException:
        for reader in readers:
            reader.close()
        raise
    return OpenSnapshot(handle, readers)


def _received(handle: WeightHandle, wanted: Wanted) -> list[PartReader]:
    """All parts of a snapshot, received side by side: each trainer rank sends its own."""
    with ThreadPoolExecutor(_RANKS_AT_ONCE, "receive") as pool:
        make = partial(CollectiveReader, version=handle.version, wanted=wanted)
        receiving = [pool.submit(make, part) for part in handle.parts]
    errors = [error for part in receiving if (error := part.exception()) is not None]
    readers: list[PartReader] = [p.result() for p in receiving if p.exception() is None]
    if errors:
        for reader in readers:
            reader.close()
        raise errors[0]
    return readers


class OpenSnapshot(contextlib.AbstractContextManager["OpenSnapshot"]):
    """Tensors of a snapshot, readable until it is closed.

    A tensor that one rank has whole is a view. Never write to it: in shared memory that ends the
    process. Clone what you change.
    """

    def __init__(self, handle: WeightHandle, readers: list[PartReader]) -> None:
        self.handle, self._readers = handle, readers
        self.received = sum(reader.received for reader in readers)
        """Bytes that were sent to this process."""

    def close(self) -> None:
        while self._readers:
            self._readers.pop().close()

    def __exit__(self, *_error: object) -> None:
        self.close()

    def tensors(self, names: set[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, or the named ones, one at a time, in the order they were published; tensors
        that are split over ranks come last."""
        split: dict[str, list[Held]] = {}
        for part, reader in zip(self.handle.parts, self._readers, strict=True):
            for number, slot in enumerate(part.slots):
                if names is not None and slot.name not in names:
                    continue
                if slot.is_whole:
                    yield slot.name, reader.tensor_of(number)
                else:
                    split.setdefault(slot.name, []).append((slot, reader, number))
        for name, held in split.items():
            slot, *_ = held[0]
            yield name, _put_together(held, Box((0,) * len(slot.whole), slot.whole))

    def box(self, name: str, box: Box) -> torch.Tensor:
        """A box of a tensor; without a copy, if one rank has it. Under `collective`, it must be one
        that was wanted."""
        return _put_together(self._by_name[name], box)

    @cached_property
    def _by_name(self) -> dict[str, list[Held]]:
        by_name: dict[str, list[Held]] = {}
        for part, reader in zip(self.handle.parts, self._readers, strict=True):
            for number, slot in enumerate(part.slots):
                by_name.setdefault(slot.name, []).append((slot, reader, number))
        return by_name

    def verify(self, names: set[str] | None = None, *, threads: int = 1) -> None:
        """Raise WrongWeightsError if the bytes of a tensor are not those that were published."""
        slots = [
            (slot, reader, number)
            for part, reader in zip(self.handle.parts, self._readers, strict=True)
            for number, slot in enumerate(part.slots if part.checksums else ())
            if names is None or slot.name in names
        ]
        if not slots:
            return  # most often: through shared memory

        def check(slot: Slot, reader: PartReader, number: int) -> None:
            for tensor, published in reader.checked(number):
                if checksum(tensor.reshape(-1).view(torch.uint8)) != published:
                    raise WrongWeightsError(
                        f"policy version {self.handle.version}: the bytes of {slot} are not those "
                        "that the trainer published"
                    )

        with ThreadPoolExecutor(threads, "verify") as pool:
            list(pool.map(check, *zip(*slots, strict=True)))


def _put_together(held: list[Held], box: Box) -> torch.Tensor:
    """A box of a tensor that several ranks have between them."""
    found = [(common(slot_box(slot), box), reader, number) for slot, reader, number in held]
    pieces = [(part, reader.box_of(n, part)) for part, reader, n in found if part is not None]
    if len(pieces) == 1 and pieces[0][0] == box:
        return pieces[0][1]
    slot, *_ = held[0]
    device = pieces[0][1].device if pieces else None
    whole = torch.empty(box.shape, dtype=slot.dtype, device=device)
    for part, piece in pieces:
        cut(whole, box, part).copy_(piece)
    return whole


def check_model(handle: WeightHandle, expected: Mapping[str, Shape], *, tied: bool) -> None:
    """Raise WrongWeightsError unless the snapshot has the tensors of a model, named in the error.

    With `tied` embeddings the output layer may be left out, or be there.
    """
    published = {name: shape for name, (shape, _) in handle.tensors().items()}
    optional = {"lm_head.weight"} if tied else set()
    for name, shape in expected.items():
        if name not in published and name not in optional:
            raise WrongWeightsError(
                f"policy version {handle.version} lacks {name!r}, which the generator's model has"
            )
        if published.get(name, shape) != shape:
            raise WrongWeightsError(
                f"policy version {handle.version} has {name!r} of shape {published[name]}; the "
                f"generator's model has {shape} ({math.prod(shape)} elements)"
            )
    for name, (_, dtype) in handle.tensors().items():
        if not dtype.is_floating_point:
            raise WrongWeightsError(
                f"policy version {handle.version} has {name!r} as {dtype}; a generator loads "
                "floating point weights"
            )
        if name not in expected and name not in optional:
            raise WrongWeightsError(
                f"policy version {handle.version} has {name!r}, which the generator's model lacks"
            )
