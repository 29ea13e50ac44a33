"""Weight sync on one host: anonymous memory files, mapped by the readers.

A `memfd` has no name in the file system, so nothing stays when its process ends, even by SIGKILL.
Readers open it through /proc/<pid>/fd, and lock it while they read: the kernel lifts the lock when
a reader dies, and the writer never overwrites what is locked.
"""

import fcntl
import mmap
import os
import secrets
import struct
import threading
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtitan_rl.weight_sync.boxes import Box, cut, slot_box
from torchtitan_rl.weight_sync.handle import Part, Slot, StaleHandleError, WeightSyncError

# Header of a buffer: a random token (a recycled pid and fd must not pass for ours), the number of
# the publication it holds, or WRITING, and its version.
_HEADER = struct.Struct("<qqq")
_HEADER_BYTES = 4096
WRITING = -1
_CLOSED = -1
"""Stands in place of the token when the writer has given up the buffer."""
_MAPPINGS_KEPT = 128
"""Most mappings kept by a reader: the first touch of a page costs ten times a later one, so the two
mappings of every trainer rank stay. They use only the writer's memory, and go when it gives it
up."""


@dataclass(frozen=True, slots=True)
class ShmLocation:
    """The memory file of one rank's snapshot, as a descriptor of the writer's process."""

    pid: int
    fd: int
    size: int
    token: int


class ShmBuffer:
    """One memory file and its mapping in the writer."""

    def __init__(self, nbytes: int) -> None:
        size = _HEADER_BYTES + nbytes
        self._fd = os.memfd_create("torchtitan_rl_weights", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size)
        self._location = ShmLocation(os.getpid(), self._fd, size, secrets.randbits(62))
        self._map = mmap.mmap(self._fd, size)
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)[_HEADER_BYTES:]
        self.reopen()

    def reopen(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._hold(WRITING)
        return True

    def seal(self, number: int, version: int, _slots: Sequence[Slot]) -> ShmLocation:
        self._hold(number, version)
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return self._location

    def close(self) -> None:
        # Readers go on, and unmap it when they are done.
        _HEADER.pack_into(self._map, 0, _CLOSED, WRITING, 0)
        os.close(self._fd)
        # Not unmapped: someone may still have a view, and it goes with the last of them.
        del self.data, self._map

    def _hold(self, number: int, version: int = 0) -> None:
        _HEADER.pack_into(self._map, 0, self._location.token, number, version)


class ShmReader:
    """Reader of a part; the part stays unchanged until the reader is closed."""

    received = 0

    def __init__(self, part: Part, version: int) -> None:
        with _mappings_changed:
            self._mapping, self._part = _map(part.location), part
            self._mapping.lock(part.number, version)
            self._views = self._mapping.views(part.slots)

    def tensor_of(self, number: int) -> torch.Tensor:
        """A view of a slot's tensor, valid until the reader is closed."""
        return self._views[number].detach()  # a caller that reshapes it must not reshape ours

    def box_of(self, number: int, box: Box) -> torch.Tensor:
        """A view of a box of a slot's tensor."""
        return cut(self.tensor_of(number), slot_box(self._part.slots[number]), box)

    def checked(self, number: int) -> list[tuple[torch.Tensor, int]]:
        """What a slot's checksum is of, and the checksum."""
        return [(self.tensor_of(number), self._part.checksums[number])]

    def close(self) -> None:
        with _mappings_changed:
            self._mapping.unlock()


class _Mapping:
    """A memory file, mapped into a reader's process."""

    def __init__(self, location: ShmLocation) -> None:
        self._location = location
        try:
            self._fd = os.open(f"/proc/{location.pid}/fd/{location.fd}", os.O_RDONLY)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and os.path.exists(f"/proc/{location.pid}"):
                raise StaleHandleError("the buffer of these weights is gone") from error
            raise WeightSyncError(
                f"cannot open the weights of process {location.pid}: {error}. The `shm` transport "
                "needs trainer and generator on one host, and the trainer alive"
            ) from error
        if os.fstat(self._fd).st_size < location.size:
            os.close(self._fd)
            raise StaleHandleError(f"the weights of process {location.pid} are gone")
        # Not to be written to: other processes read the same pages.
        self._map = mmap.mmap(self._fd, location.size, prot=mmap.PROT_READ)
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # about that
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._slots: tuple[Slot, ...] = ()
        self._views: list[torch.Tensor] = []
        self._readers = 0

    def views(self, slots: tuple[Slot, ...]) -> list[torch.Tensor]:
        """Tensors of the slots. They are kept, since every other version has the same slots."""
        if slots != self._slots:
            data = self._bytes[_HEADER_BYTES:]
            self._slots, self._views = (
                slots,
                [data[s.offset : s.offset + s.nbytes].view(s.dtype).view(s.shape) for s in slots],
            )
        return self._views

    def lock(self, number: int, version: int) -> None:
        """Keep the writer from overwriting the publication `number`, or raise StaleHandleError."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._stale(version, "being rewritten") from None
        token, held, newer = _HEADER.unpack_from(self._map, 0)
        self._readers += 1
        if token != self._location.token or held != number:
            self.unlock()
            if token != self._location.token:
                raise StaleHandleError(f"the buffer of policy version {version} is gone")
            now = "half-written" if held == WRITING else f"holding version {newer}"
            raise self._stale(version, now)

    def unlock(self) -> None:
        self._readers -= 1
        if self.is_read:
            return
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        token, *_ = _HEADER.unpack_from(self._map, 0)
        if token != self._location.token:
            _mappings.pop(self._location, None)
            self.close()

    @property
    def is_read(self) -> bool:
        return self._readers > 0

    @property
    def is_needed(self) -> bool:
        """Whether the mapping is being read, or the writer may still publish in it."""
        token, *_ = _HEADER.unpack_from(self._map, 0)
        alive = os.path.exists(f"/proc/{self._location.pid}")
        return self.is_read or (alive and token == self._location.token)

    def close(self) -> None:
        # The map is not closed: views of it may exist, and it goes with the last of them.
        os.close(self._fd)

    def _stale(self, version: int, now: str) -> StaleHandleError:
        return StaleHandleError(
            f"policy version {version} was overwritten: its buffer is {now}; pull the latest handle"
        )


_mappings: "OrderedDict[ShmLocation, _Mapping]" = OrderedDict()
_mappings_changed = threading.Lock()


def _map(location: ShmLocation) -> _Mapping:
    """The mapping of a buffer; the most recently used mappings are kept."""
    if location not in _mappings:
        for other in [at for at, mapping in _mappings.items() if not mapping.is_needed]:
            _mappings.pop(other).close()
        unread = [at for at, mapping in _mappings.items() if not mapping.is_read]
        for oldest in unread[: max(0, len(_mappings) + 1 - _MAPPINGS_KEPT)]:
            _mappings.pop(oldest).close()
        _mappings[location] = _Mapping(location)
    _mappings.move_to_end(location)
    return _mappings[location]
