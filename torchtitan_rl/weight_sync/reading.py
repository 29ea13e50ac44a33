"""Reading snapshots: everything is checked before the first tensor is returned."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from torchtitan_rl.weight_sync.file import FileReader
from torchtitan_rl.weight_sync.handle import (
    Part,
    Shape,
    Slot,
    WeightHandle,
    WeightSyncError,
    WrongWeightsError,
)
from torchtitan_rl.weight_sync.shm import ShmReader
from torchtitan_rl.weight_sync.snapshot import checksum


class PartReader(Protocol):
    """Open part of a snapshot: what one trainer rank has published."""

    def tensor_of(self, number: int) -> torch.Tensor:
        """The tensor of a slot, by the slot's number; valid until the reader is closed."""
        ...

    def close(self) -> None: ...


Box = tuple[Slot, PartReader, int]
"""Part of a tensor: its slot, the reader that has it, and the slot's number there."""


def open_snapshot(handle: WeightHandle) -> "OpenSnapshot":
    """Open the snapshot of a handle; it cannot change while it is open.

    Raises StaleHandleError if it has been overwritten, WeightSyncError if it cannot be reached.
    """
    if handle.transport == "rdma":
        raise WeightSyncError(
            "a snapshot of the `rdma` transport is in another process: read it inside an actor, "
            "with `await rdma.Inbox().fetch(handle)`, and open what that returns"
        )
    make: Callable[[Part, int], PartReader]
    make = ShmReader if handle.transport == "shm" else FileReader
    readers: list[PartReader] = []
    try:
        for part in handle.parts:
            readers.append(make(part, handle.version))
    except BaseException:
        for reader in readers:
            reader.close()
        raise
    return OpenSnapshot(handle, readers)


class OpenSnapshot(contextlib.AbstractContextManager["OpenSnapshot"]):
    """Tensors of a snapshot, readable until it is closed.

    A tensor that one rank has whole is a view. Never write to it: in shared memory that ends the
    process. Clone what you change.
    """

    def __init__(self, handle: WeightHandle, readers: list[PartReader]) -> None:
        self.handle, self._readers = handle, readers

    def close(self) -> None:
        while self._readers:
            self._readers.pop().close()

    def __exit__(self, *_error: object) -> None:
        self.close()

    def tensors(self, names: set[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, or the named ones, one at a time, in the order they were published; tensors
        that are split over ranks come last."""
        cut: dict[str, list[Box]] = {}
        for part, reader in zip(self.handle.parts, self._readers, strict=True):
            for number, slot in enumerate(part.slots):
                if names is not None and slot.name not in names:
                    continue
                if slot.is_whole:
                    yield slot.name, reader.tensor_of(number)
                else:
                    cut.setdefault(slot.name, []).append((slot, reader, number))
        for name, boxes in cut.items():
            yield name, _put_together(boxes)

    def verify(self, names: set[str] | None = None, *, threads: int = 1) -> None:
        """Raise WrongWeightsError if the bytes of a tensor are not those that were published."""
        boxes = [
            (slot, reader, number, part.checksums[number])
            for part, reader in zip(self.handle.parts, self._readers, strict=True)
            for number, slot in enumerate(part.slots if part.checksums else ())
            if names is None or slot.name in names
        ]
        if not boxes:
            return  # most often: through shared memory

        def check(slot: Slot, reader: PartReader, number: int, published: int) -> None:
            if checksum(reader.tensor_of(number).reshape(-1).view(torch.uint8)) != published:
                raise WrongWeightsError(
                    f"weights version {self.handle.version}: the bytes of {slot} are not those "
                    "that the trainer published"
                )

        with ThreadPoolExecutor(threads, "verify") as pool:
            list(pool.map(check, *zip(*boxes, strict=True)))


def _put_together(boxes: list[Box]) -> torch.Tensor:
    first, *_ = boxes[0]
    whole = torch.empty(first.whole, dtype=first.dtype)
    for slot, reader, number in boxes:
        box = tuple(slice(s, s + n) for s, n in zip(slot.start, slot.shape, strict=True))
        whole[box] = reader.tensor_of(number)
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
                f"weights version {handle.version} lack {name!r}, which the generator's model has"
            )
        if published.get(name, shape) != shape:
            raise WrongWeightsError(
                f"weights version {handle.version} have {name!r} of shape {published[name]}; the "
                f"generator's model has {shape} ({math.prod(shape)} elements)"
            )
    for name, (_, dtype) in handle.tensors().items():
        if not dtype.is_floating_point:
            raise WrongWeightsError(
                f"weights version {handle.version} have {name!r} as {dtype}; a generator loads "
                "floating point weights"
            )
        if name not in expected and name not in optional:
            raise WrongWeightsError(
                f"weights version {handle.version} have {name!r}, which the generator's model lacks"
            )
