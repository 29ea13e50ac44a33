"""Reading snapshots: everything is checked before the first tensor is handed out."""

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
    """What one trainer rank has published, open."""

    def tensor_of(self, slot: Slot) -> torch.Tensor:
        """In shape and dtype of the slot, good until the reader is closed."""
        ...

    def close(self) -> None: ...


def open_snapshot(handle: WeightHandle) -> "OpenSnapshot":
    """The snapshot behind a handle, which cannot change while it is open.

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
    """Tensors of a snapshot: views where one rank has all of a tensor. They can be read until it is
    closed, and never written to: in shared memory that ends the process. Clone what you change.
    """

    def __init__(self, handle: WeightHandle, readers: list[PartReader]) -> None:
        self.handle, self._readers = handle, readers

    def close(self) -> None:
        while self._readers:
            self._readers.pop().close()

    def __exit__(self, *_error: object) -> None:
        self.close()

    def tensors(self, names: set[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, or those of these names, one at a time, in the order they were published."""
        boxes: dict[str, list[tuple[Slot, PartReader]]] = {}
        for part, reader in zip(self.handle.parts, self._readers, strict=True):
            for slot in part.slots:
                if names is None or slot.name in names:
                    boxes.setdefault(slot.name, []).append((slot, reader))
        for name, owned in boxes.items():
            yield name, _assemble(owned)

    def verify(self, names: set[str] | None = None, *, threads: int = 1) -> None:
        """Raise WrongWeightsError if the bytes of a tensor are not those that were published."""
        slots = [
            (slot, reader)
            for part, reader in zip(self.handle.parts, self._readers, strict=True)
            for slot in part.slots
            if slot.checksum is not None and (names is None or slot.name in names)
        ]

        if not slots:
            return  # most often: through shared memory

        def check(owned: tuple[Slot, PartReader]) -> None:
            slot, reader = owned
            if checksum(reader.tensor_of(slot).reshape(-1).view(torch.uint8)) != slot.checksum:
                raise WrongWeightsError(
                    f"weights version {self.handle.version}: the bytes of {slot} are not those "
                    "that the trainer published"
                )

        with ThreadPoolExecutor(threads, "verify") as pool:
            list(pool.map(check, slots))


def _assemble(owned: list[tuple[Slot, PartReader]]) -> torch.Tensor:
    slot, reader = owned[0]
    if slot.is_whole:
        return reader.tensor_of(slot)
    whole = torch.empty(slot.whole, dtype=slot.dtype)
    for slot, reader in owned:
        box = tuple(slice(s, s + n) for s, n in zip(slot.start, slot.shape, strict=True))
        whole[box] = reader.tensor_of(slot)
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
