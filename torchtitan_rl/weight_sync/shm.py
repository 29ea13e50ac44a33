"""Weight sync on one host: two anonymous memory files, written in turn, mapped by the readers.

A `memfd` has no name in the file system, so nothing is left behind when its process dies, however
it dies. Readers open it through /proc/<pid>/fd. Two buffers let the trainer publish version v+1
while a generator still reads v; publishing v+2 reuses v's buffer, and who still reads v is told.
"""

import mmap
import os
import secrets
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from torchtitan_rl.weight_sync.handle import (
    NamedTensors,
    StaleHandleError,
    TensorSlot,
    WeightHandle,
    WeightSyncError,
)

# Header of a buffer: a random token (a recycled pid and fd must not pass for ours) and the version
# of what the buffer holds, or WRITING.
_HEADER = struct.Struct("<qq")
_HEADER_BYTES = 64
_ALIGNMENT = 64
WRITING = -1


@dataclass(frozen=True, slots=True)
class ShmLocation:
    pid: int
    fd: int
    size: int
    token: int


class ShmPublisher:
    """Writes snapshots into two reused memory files.

    Example:
        >>> publisher = ShmPublisher()
        >>> handle = publisher.publish([("w", torch.ones(2))], version=1)
        >>> [(name, t.tolist()) for name, t in fetch(handle)]
        [('w', [1.0, 1.0])]
    """

    def __init__(self) -> None:
        self._buffers: list[_Buffer | None] = [None, None]
        self._turn = 0

    def publish(self, named_tensors: NamedTensors, version: int) -> WeightHandle:
        if version < 0:
            raise ValueError(f"policy versions start at 0, got {version}")
        tensors = [(name, t.detach()) for name, t in named_tensors]
        slots = _layout(tensors)
        size = slots[-1].offset + slots[-1].nbytes if slots else _HEADER_BYTES
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.location.size < size:
            if buffer is not None:
                buffer.close()
            buffer = self._buffers[self._turn] = _Buffer(size)
        self._turn = 1 - self._turn
        buffer.write(tensors, slots, version)
        return WeightHandle(version, "shm", buffer.location, slots)

    def close(self) -> None:
        for buffer in self._buffers:
            if buffer is not None:
                buffer.close()
        self._buffers = [None, None]


class _Buffer:
    """One memory file and its mapping in the writer."""

    def __init__(self, size: int) -> None:
        fd = os.memfd_create("torchtitan_rl_weights", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        self.location = ShmLocation(os.getpid(), fd, size, secrets.randbits(62))
        self._map = mmap.mmap(fd, size)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def write(
        self, tensors: list[tuple[str, torch.Tensor]], slots: tuple[TensorSlot, ...], version: int
    ) -> None:
        self._set_version(WRITING)
        for (_, tensor), slot in zip(tensors, slots, strict=True):
            target = self._bytes[slot.offset : slot.offset + slot.nbytes]
            target.view(slot.dtype).view(slot.shape).copy_(tensor)
        self._set_version(version)

    def _set_version(self, version: int) -> None:
        _HEADER.pack_into(self._map, 0, self.location.token, version)

    def close(self) -> None:
        # Marked first, so that a reader that still has it mapped is told instead of reading on.
        self._set_version(WRITING)
        del self._bytes
        self._map.close()
        os.close(self.location.fd)


def _layout(tensors: list[tuple[str, torch.Tensor]]) -> tuple[TensorSlot, ...]:
    slots, offset = [], _HEADER_BYTES
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        slots.append(TensorSlot(name, tuple(tensor.shape), tensor.dtype, offset, nbytes))
        offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(slots)


def fetch(handle: WeightHandle) -> Iterator[tuple[str, torch.Tensor]]:
    """Views into the mapped snapshot, in publishing order. See `weight_sync.handle.fetch`."""
    check_fresh(handle)
    mapped = _mapped(handle.location)
    # A page this process wrote to would be its own from then on, and old for ever: drop such pages.
    mapped.madvise(mmap.MADV_DONTNEED)
    data = torch.frombuffer(mapped, dtype=torch.uint8)
    for slot in handle.slots:
        raw = data[slot.offset : slot.offset + slot.nbytes]
        yield slot.name, raw.view(slot.dtype).view(slot.shape)
        check_fresh(handle)


def check_fresh(handle: WeightHandle) -> None:
    """Raise StaleHandleError unless the buffer holds exactly the handle's version."""
    token, version = _HEADER.unpack_from(_mapped(handle.location), 0)
    if token != handle.location.token:
        raise StaleHandleError(f"the buffer of weights version {handle.version} is gone")
    if version != handle.version:
        now = "being rewritten" if version == WRITING else f"holding version {version}"
        raise StaleHandleError(
            f"weights version {handle.version} were overwritten: their buffer is {now}; "
            "pull the latest handle"
        )


# A mapping is kept: the first touch of its pages costs ten times a later one. Four are enough for
# the two buffers of a trainer and the two of the one it was restarted as.
@lru_cache(maxsize=4)
def _mapped(location: ShmLocation) -> mmap.mmap:
    path = f"/proc/{location.pid}/fd/{location.fd}"
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise WeightSyncError(
            f"cannot open the weights of process {location.pid}: {error}. The `shm` transport "
            "needs trainer and generator on one host, and the trainer alive"
        ) from error
    try:
        if os.fstat(fd).st_size < location.size:
            raise StaleHandleError(f"the weights of process {location.pid} are gone")
        # A private mapping: a reader can never write into the snapshot.
        return mmap.mmap(fd, location.size, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
