"""Memory files: anonymous memory of one process, which others on its host open, lock and read.

A `memfd` has no name in the file system, so nothing stays when its process ends, even by SIGKILL.
Readers open it through /proc/<pid>/fd, and lock it while they read: the kernel lifts the lock when
a reader dies, and the writer never overwrites what is locked. No torch is needed for any of this:
a process that only hands weights on has none.
"""

import fcntl
import mmap
import os
import secrets
import struct
from dataclasses import dataclass

from torchtitan_rl.weight_sync.handle import StaleHandleError, WeightSyncError

# Header of a file: a random token (a recycled pid and fd must not pass for ours), the number of the
# publication it holds, or WRITING, and its version.
_HEADER = struct.Struct("<qqq")
HEADER_BYTES = 4096
"""Where the data begins."""
WRITING = -1
_CLOSED = -1
"""Stands in place of the token when the writer has given up the file."""


@dataclass(frozen=True, slots=True)
class ShmLocation:
    """A memory file, as a descriptor of the writer's process."""

    pid: int
    fd: int
    size: int
    """Bytes of the header and the data."""
    token: int


class MemoryFile:
    """A memory file and its mapping in the writer. A new one is being written to until `seal`."""

    def __init__(self, nbytes: int) -> None:
        size = HEADER_BYTES + nbytes
        self.fd = os.memfd_create("torchtitan_rl_weights", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self.location = ShmLocation(os.getpid(), self.fd, size, secrets.randbits(62))
        self.map = mmap.mmap(self.fd, size)
        self.reopen()

    def reopen(self) -> bool:
        """Mark the file as holding no version. False: it is being read, and stays unchanged."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._hold(WRITING)
        return True

    def seal(self, number: int, version: int) -> ShmLocation:
        """Mark the file as holding publication `number` of `version`, and let it be read."""
        self._hold(number, version)
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return self.location

    def close(self) -> None:
        """Give the file up. Readers go on, and unmap it when they are done."""
        _HEADER.pack_into(self.map, 0, _CLOSED, WRITING, 0)
        os.close(self.fd)
        # Not unmapped: someone may still have a view, and it goes with the last of them.
        del self.map

    def _hold(self, number: int, version: int = 0) -> None:
        _HEADER.pack_into(self.map, 0, self.location.token, number, version)


class OpenMemoryFile:
    """A memory file opened by a process that reads it; several of its readers may share it."""

    def __init__(self, location: ShmLocation) -> None:
        self.location = location
        try:
            self.fd = os.open(f"/proc/{location.pid}/fd/{location.fd}", os.O_RDONLY)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and os.path.exists(f"/proc/{location.pid}"):
                raise StaleHandleError("the buffer of these weights is gone") from error
            raise WeightSyncError(
                f"cannot open the weights of process {location.pid}: {error}. Shared memory is for "
                "processes of one host, and the one that wrote it must be alive"
            ) from error
        if os.fstat(self.fd).st_size < location.size:
            os.close(self.fd)
            raise StaleHandleError(f"the weights of process {location.pid} are gone")
        self._readers = 0

    def lock(self, number: int, version: int) -> None:
        """Keep the writer from overwriting the publication `number`, or raise StaleHandleError."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _stale(version, "being rewritten") from None
        token, held, newer = self._header()
        self._readers += 1
        if token != self.location.token or held != number:
            self.unlock()
            if token != self.location.token:
                raise StaleHandleError(f"the buffer of policy version {version} is gone")
            now = "half-written" if held == WRITING else f"holding version {newer}"
            raise _stale(version, now)

    def unlock(self) -> None:
        """Let the writer overwrite it, when the last of this process's readers is done."""
        self._readers -= 1
        if not self.is_read:
            fcntl.flock(self.fd, fcntl.LOCK_UN)

    @property
    def is_read(self) -> bool:
        """Whether a reader of this process has it locked."""
        return self._readers > 0

    @property
    def is_given_up(self) -> bool:
        """Whether its writer will never publish in it again, as far as the file says."""
        token, *_ = self._header()
        return token != self.location.token

    @property
    def is_needed(self) -> bool:
        """Whether it is being read, or its writer may still publish in it."""
        alive = os.path.exists(f"/proc/{self.location.pid}")
        return self.is_read or (alive and not self.is_given_up)

    def close(self) -> None:
        """Close the descriptor, and with it lift the lock."""
        os.close(self.fd)

    def _header(self) -> tuple[int, int, int]:
        token, number, version = _HEADER.unpack(os.pread(self.fd, _HEADER.size, 0))
        return token, number, version


def _stale(version: int, now: str) -> StaleHandleError:
    return StaleHandleError(
        f"policy version {version} was overwritten: its buffer is {now}; pull the latest handle"
    )
