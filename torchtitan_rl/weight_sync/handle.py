"""The interface of weight sync: `publish` a snapshot, send its small handle, `fetch` the tensors.

A handle is what travels in actor messages; the tensors never do (a message moves bytes at a
twentieth of memcpy speed). Names are HF names, so any engine that loads an HF folder can read them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

Transport = Literal["shm"]
NamedTensors = Iterable[tuple[str, torch.Tensor]]


class WeightSyncError(RuntimeError):
    """A snapshot cannot be read; the message says which one and why."""


class StaleHandleError(WeightSyncError):
    """The snapshot behind a handle has been overwritten by a later one, or is half-written."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where one tensor lies in a snapshot."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightHandle:
    """A published snapshot: small, picklable, and valid until its buffer is reused."""

    version: int
    """Policy version of the weights: the number of batches they were trained on."""
    transport: Transport
    location: Any
    """What the transport needs to find the bytes."""
    slots: tuple[TensorSlot, ...]

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)


class Publisher(Protocol):
    """The trainer's side of a transport."""

    def publish(self, named_tensors: NamedTensors, version: int) -> WeightHandle:
        """Copy the tensors into a snapshot, so that the optimizer may step while readers read."""
        ...

    def close(self) -> None:
        """Free the buffers. Readers that still have them mapped keep what they mapped."""
        ...


def make_publisher(transport: Transport) -> Publisher:
    from torchtitan_rl.weight_sync.shm import ShmPublisher

    return {"shm": ShmPublisher}[transport]()


def fetch(handle: WeightHandle) -> Iterator[tuple[str, torch.Tensor]]:
    """The snapshot's tensors, as views: copy what must outlive the next `publish` but one.

    Raises StaleHandleError as soon as the buffer no longer holds the handle's version. A caller
    that keeps views past the end of the iteration calls `check_fresh` when it is done with them.
    """
    from torchtitan_rl.weight_sync import shm

    return {"shm": shm.fetch}[handle.transport](handle)


def check_fresh(handle: WeightHandle) -> None:
    """Raise StaleHandleError if the snapshot was overwritten, so what was read may be torn."""
    from torchtitan_rl.weight_sync import shm

    {"shm": shm.check_fresh}[handle.transport](handle)
