"""Copies of publications that a relay has for the processes of its host.

Of each publisher there are two, in turn, as a trainer has two snapshots: version v+1 leaves version
v as it is. What is the same in both is not received again.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

from torchtitan_rl.weight_sync.handle import StaleHandleError, WeightSyncError
from torchtitan_rl.weight_sync.memory_file import HEADER_BYTES, MemoryFile, ShmLocation

_NOTHING = -1
_KEPT = 2
_PIECE = 8 << 20
"""Most bytes copied at once: other threads of the process wait for it."""


class Copy:
    """A publication in memory of this host, whole or on its way. Bytes below `valid` are as they
    were published."""

    def __init__(self, file: MemoryFile, number: int, attempt: int) -> None:
        self.file, self.number, self.attempt = file, number, attempt
        self.data = memoryview(file.map)[HEADER_BYTES:]
        self.size = len(self.data)
        self.valid = 0
        self.is_whole = False
        self.error = ""
        """Why no more of it comes."""
        self.users = 1
        """Who reads it in this process, or writes to it."""
        self.is_dropped = False


class Copies:
    """All copies of a relay; any thread may use it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Notified when a copy has begun, or has more valid bytes, or failed."""
        self._of: dict[int, list[Copy]] = {}
        """By publisher; the last is the one that was begun last."""
        self._failed: dict[int, Copy] = {}
        """By publisher: the copy that failed last."""
        self._receiving: set[int] = set()
        self._is_closed = False

    # ---- receiving ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def turn(self, publisher: int) -> Iterator[None]:
        """Inside, no other thread begins a copy of this publisher's."""
        with self.changed:
            self.changed.wait_for(lambda: publisher not in self._receiving)
            self._receiving.add(publisher)
        try:
            yield
        finally:
            with self.changed:
                self._receiving.remove(publisher)
                self.changed.notify_all()

    def whole(self, publisher: int, number: int) -> ShmLocation | None:
        """Where a publication is, if all of it is here."""
        with self.changed:
            for copy in self._of.get(publisher, ()):
                if copy.number == number and copy.is_whole:
                    return copy.file.location
        return None

    @contextlib.contextmanager
    def begun(
        self, publisher: int, number: int, size: int, attempt: int
    ) -> Iterator[tuple[Copy, Copy | None, int]]:
        """A copy to be received, which is dropped if that fails; another one to take unchanged
        bytes from; and the number of the publication that the first one held, -1 for none."""
        with self.changed:
            if self._is_closed:
                raise WeightSyncError("this relay has been closed")
            copy, held = self._next(publisher, number, size, attempt)
            base = self._base(publisher, number, size)
            self._of.setdefault(publisher, []).append(copy)
            self.changed.notify_all()
        try:
            yield copy, base, held
        except BaseException as error:
            self._fail(publisher, copy, str(error) or repr(error))
            raise
        finally:
            self.release(copy)
            if base is not None:
                self.release(base)

    def _next(self, publisher: int, number: int, size: int, attempt: int) -> tuple[Copy, int]:
        """The older copy, to be overwritten, or a new one."""
        copies = self._of.get(publisher, [])
        if len(copies) < _KEPT:
            return Copy(MemoryFile(size), number, attempt), _NOTHING
        older = copies.pop(0)
        if older.users or older.size != size or not older.file.reopen():
            self._drop(older)  # who reads it goes on
            return Copy(MemoryFile(size), number, attempt), _NOTHING
        older.data.release()
        held = older.number if older.number < number else _NOTHING
        return Copy(older.file, number, attempt), held

    def _base(self, publisher: int, number: int, size: int) -> Copy | None:
        for copy in reversed(self._of.get(publisher, [])):
            if copy.number < number and copy.size == size:
                copy.users += 1
                return copy
        return None

    def advance(self, copy: Copy, valid: int) -> None:
        """Let the bytes below `valid` be handed on."""
        with self.changed:
            copy.valid = valid
            self.changed.notify_all()

    def finish(self, copy: Copy, version: int) -> ShmLocation:
        """Let a copy be read by the processes of this host."""
        with self.changed:
            if copy.is_dropped:
                raise StaleHandleError(
                    f"policy version {version} is of a trainer that has been replaced meanwhile"
                )
            copy.valid, copy.is_whole = copy.size, True
            self.changed.notify_all()
            return copy.file.seal(copy.number, version)

    def _fail(self, publisher: int, copy: Copy, error: str) -> None:
        with self.changed:
            copy.error = error
            self._failed[publisher] = copy
            with contextlib.suppress(ValueError):  # it was dropped meanwhile
                self._of.get(publisher, []).remove(copy)
            self._drop(copy)
            self.changed.notify_all()

    # ---- handing on -----------------------------------------------------------------------------

    def find(self, publisher: int, number: int, attempt: int) -> Copy | None:
        """The copy of a publication, whole or on its way, until `release`; None: it has not begun.
        Raises WeightSyncError if it has failed. To be called with `changed` held."""
        for copy in reversed(self._of.get(publisher, [])):
            if copy.number == number:
                copy.users += 1
                return copy
        failed = self._failed.get(publisher)
        # Of an earlier attempt: the order for this one is on its way.
        if failed is not None and (failed.number, failed.attempt) == (number, attempt):
            raise WeightSyncError(failed.error)
        return None

    def release(self, copy: Copy) -> None:
        """Stop using a copy."""
        with self.changed:
            copy.users -= 1
            if copy.is_dropped and not copy.users:
                self._close(copy)

    def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait so long for a condition of the copies; returns whether it holds."""
        with self.changed:
            return self.changed.wait_for(ready, seconds)

    # ---- dropping -------------------------------------------------------------------------------

    def keep(self, publishers: Iterable[int]) -> None:
        """Drop the copies of all other publishers: of a trainer that has been replaced."""
        with self.changed:
            for gone in self._of.keys() - set(publishers):
                for copy in self._of.pop(gone):
                    self._drop(copy)
                self._failed.pop(gone, None)

    def close(self) -> None:
        """Drop all copies; readers that have them open can go on reading."""
        with self.changed:
            self._is_closed = True
            self.keep(())
            self.changed.notify_all()

    def _drop(self, copy: Copy) -> None:
        copy.is_dropped = True
        if not copy.users:
            self._close(copy)

    def _close(self, copy: Copy) -> None:
        copy.data.release()
        copy.file.close()


def copy_bytes(target: Copy, source: Copy, first: int, last: int) -> None:
    """Copy bytes from one copy to another."""
    for start in range(first, last, _PIECE):
        end = min(last, start + _PIECE)
        target.data[start:end] = source.data[start:end]
