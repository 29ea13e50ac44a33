"""The lock of a run's folder: one process at a time trains in it, on this machine or another.

The kernel holds the lock, by `flock` on a file in the folder, and drops it with the process,
however that ends. On NFS it is a byte-range lock, which other hosts see. Only the lock decides;
what the file says, who holds it and since when, is for messages.
"""

import contextlib
import errno
import fcntl
import json
import os
import shlex
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from torchtitan_rl.observability.console import console
from torchtitan_rl.observability.run_folder import RunFolderError

LOCK_FILE = "lock"
HELD = (errno.EAGAIN, errno.EACCES)
"""Errors of `flock` if another process holds the lock; EACCES is that of some NFS servers."""
ATTEMPTS = 10
"""How often a lock is tried whose file another process removes at the same time."""
LONGEST_COMMAND = 300
"""Most characters of a command in a message."""


class RunLockedError(RunFolderError):
    """Another process trains in the run's folder; the message says which."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock, as the lock's file says."""

    host: str
    pid: int
    since: str
    command: str

    @classmethod
    def this_process(cls) -> Self:
        """The process that asks."""
        command = shlex.join([Path(sys.executable).name, *sys.argv])
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        return cls(socket.gethostname(), os.getpid(), since, command)

    @classmethod
    def read(cls, file: Path) -> Self | None:
        """The contents of a lock's file; None if it is empty, or was not written by this class."""
        try:
            return cls(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def __str__(self) -> str:
        command = self.command
        if len(command) > LONGEST_COMMAND:
            command = command[:LONGEST_COMMAND] + " ..."
        return f"process {self.pid} on {self.host}, since {self.since} ({command})"


class RunLock:
    """The lock of one run's folder, to be acquired and released by the process that trains there.

    The file stays in the folder. A folder that was made only for the lock is removed with it, so
    that a run that is refused leaves nothing.

    Example:
        lock = RunLock(Path("outputs/run"))
        lock.acquire()
        ...
        lock.release()
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.file = self.folder / LOCK_FILE
        self._descriptor: int | None = None
        self._made: list[Path] = []
        """Folders that were made for the lock, the innermost first."""

    def acquire(self) -> None:
        """Take the lock, unless this object has it; raises RunLockedError if another has.

        Where the file system has no locks, a notice says so, and nothing is locked.
        """
        if self._descriptor is not None:
            return
        try:
            self._descriptor = self._open_locked()
            _write(self._descriptor, json.dumps(asdict(Holder.this_process())))
        except OSError as error:
            self.release()
            raise RunFolderError(
                f"{os.path.relpath(self.folder)} cannot be written to ({error.strerror}): choose "
                "another --output_dir, or make that folder writable"
            ) from error

    def release(self) -> None:
        """Give the lock back, if this object has it."""
        descriptor, self._descriptor = self._descriptor, None
        made, self._made = self._made, []
        with contextlib.suppress(OSError):  # the folder is gone, the disk full, or a run in it
            if descriptor is not None:
                # Before it is unlocked: who opened the file meanwhile sees that it is gone.
                if made and [path.name for path in self.folder.iterdir()] == [LOCK_FILE]:
                    self.file.unlink()
                else:
                    _write(descriptor, "")
            for folder in made:
                folder.rmdir()
        if descriptor is not None:
            os.close(descriptor)

    def _open_locked(self) -> int:
        for _ in range(ATTEMPTS):
            self._make_folder()
            # Python opens files so that no program which this one starts inherits them: a worker
            # that survives must not hold the lock.
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                self._lock(descriptor)
                if _is_still(descriptor, self.file):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        raise OSError(errno.EBUSY, f"{self.file} changes all the time")

    def _make_folder(self) -> None:
        missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._made = self._made or missing

    def _lock(self, descriptor: int) -> None:
        where = os.path.relpath(self.folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = Holder.read(self.file)
            if error.errno in HELD:
                raise RunLockedError(
                    f"a run is going on in {where}, by {holder or 'another process'}: wait until "
                    "it ends or stop it, or choose another --run_name"
                ) from None
            last = f" The last one that did not say it was done: {holder}." if holder else ""
            console.print(
                f"note: {where} cannot be locked ({error.strerror}): this file system has no "
                f"locks. Start no second run in this folder.{last}",
                markup=False,
            )


def _is_still(descriptor: int, file: Path) -> bool:
    """Whether the file has not been removed, and perhaps made again, since it was opened."""
    try:
        now = file.stat()
    except FileNotFoundError:
        return False
    own = os.fstat(descriptor)
    return (own.st_dev, own.st_ino) == (now.st_dev, now.st_ino)


def _write(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
    os.fsync(descriptor)  # other hosts see it only then
