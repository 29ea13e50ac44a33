"""The lock of a run's folder: real processes, killed and not."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_rl.observability import run_lock
from torchtitan_rl.observability.run_folder import RunFolderError
from torchtitan_rl.observability.run_lock import RunLock, RunLockedError

HOLD = """
import subprocess, sys
from pathlib import Path
from torchtitan_rl.observability.run_lock import RunLock, RunLockedError

try:
    RunLock(Path(sys.argv[1])).acquire()
    # A worker that would keep whatever it inherits, also when this process is gone.
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    worker = subprocess.Popen(["sleep", "60"], close_fds=False, start_new_session=True, **quiet)
    print("locked", worker.pid, flush=True)
except RunLockedError:
    print("refused", flush=True)
sys.stdin.read()
"""


class Process:
    """A process that has tried to lock a folder, and lives on."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.worker = 0

    def outcome(self) -> str:
        assert self.process.stdout is not None
        said, *worker = self.process.stdout.readline().split()
        self.worker = int(worker[0]) if worker else 0
        return said

    def end(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(30)


@pytest.fixture
def start():
    started: list[Process] = []

    def make(folder: Path) -> Process:
        started.append(Process(folder))
        return started[-1]

    yield make
    for process in started:
        process.end()
        if process.worker:
            os.kill(process.worker, signal.SIGKILL)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "outputs" / "run"
    path.mkdir(parents=True)
    return path


def test_another_process_is_refused_and_told_who_holds_the_lock(folder, start, monkeypatch):
    monkeypatch.chdir(folder.parents[1])
    holder = start(folder)
    assert holder.outcome() == "locked"
    with pytest.raises(RunLockedError) as error:
        RunLock(folder).acquire()
    who = f"process {holder.process.pid} on {re.escape(socket.gethostname())}"
    command = re.escape(f"-c {folder}")
    assert re.fullmatch(
        rf"a run is going on in outputs/run, by {who}, since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d "
        rf"[+-]\d{{4}} \(python\S* {command}\): wait until it ends or stop it, or choose another "
        r"--run_name",
        str(error.value),
    )
    assert "--resume" not in str(error.value)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_lock_ends_with_its_process_though_a_worker_survives(folder, start, number):
    holder = start(folder)
    assert holder.outcome() == "locked"
    holder.end(number)
    os.kill(holder.worker, 0)  # it is there
    lock = RunLock(folder)
    lock.acquire()
    lock.release()


def test_of_processes_that_start_together_one_gets_the_lock(folder, start):
    outcomes = [process.outcome() for process in [start(folder) for _ in range(4)]]
    assert sorted(outcomes) == ["locked", "refused", "refused", "refused"]


def test_what_a_dead_process_has_written_locks_nothing(folder):
    """Nor does a process that has got its number."""
    said = {"host": socket.gethostname(), "pid": os.getpid(), "since": "then", "command": "train"}
    (folder / "lock").write_text(json.dumps(said))
    lock = RunLock(folder)
    lock.acquire()
    assert json.loads((folder / "lock").read_text())["since"] != "then"
    lock.release()
    assert (folder / "lock").read_text() == ""


def test_a_lock_is_acquired_once_and_released_at_once(folder):
    lock = RunLock(folder)
    lock.acquire()
    lock.acquire()
    with pytest.raises(RunLockedError):
        RunLock(folder).acquire()
    lock.release()
    lock.release()
    other = RunLock(folder)
    other.acquire()
    other.release()


def test_a_folder_that_was_made_for_the_lock_goes_with_it_and_a_run_stays(tmp_path):
    lock = RunLock(tmp_path / "outputs" / "a" / "run")
    lock.acquire()
    lock.release()
    assert not list(tmp_path.iterdir())
    lock.acquire()
    (lock.folder / "config.json").write_text("{}")
    lock.release()
    assert {path.name for path in lock.folder.iterdir()} == {"config.json", "lock"}


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_none(folder, monkeypatch):
    """Else two processes would hold locks, each on a file of its own."""
    real, opened = run_lock.fcntl.flock, []

    def removed_first(descriptor, how):
        if not opened:
            (folder / "lock").unlink()
        opened.append(descriptor)
        real(descriptor, how)

    monkeypatch.setattr(run_lock.fcntl, "flock", removed_first)
    lock = RunLock(folder)
    lock.acquire()
    assert len(opened) == 2
    with pytest.raises(RunLockedError):
        RunLock(folder).acquire()
    lock.release()


def test_a_file_system_without_locks_gets_a_notice(folder, monkeypatch, capsys):
    def refuse(descriptor, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(run_lock.fcntl, "flock", refuse)
    first, second = RunLock(folder), RunLock(folder)
    first.acquire()
    said = capsys.readouterr().out
    assert "cannot be locked (No locks available)" in said
    assert "process" not in said
    second.acquire()
    assert f"process {os.getpid()} on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("where", "why"), [("file/outputs/run", "Not a directory"), ("file", "File exists")]
)
def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, monkeypatch, where, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=rf"^{where} cannot be written to \({why}\): choose"):
        RunLock(tmp_path / where).acquire()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_read_only_folder_is_named(monkeypatch, tmp_path):
    """The folder is simulated by the error, because root may write anywhere."""

    def refuse(*_how, **_more):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(run_lock.os, "open", refuse)
    with pytest.raises(RunFolderError, match=r"run cannot be written to \(Permission denied\)"):
        RunLock(tmp_path / "run").acquire()
    assert not list(tmp_path.iterdir())
