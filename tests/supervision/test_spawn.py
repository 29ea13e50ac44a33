"""Processes that do not start in time: tried once more, then named."""

import asyncio
import fcntl
import os
import platform
import pty
import re
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from torchtitan_rl.actors.grader import Grader
from torchtitan_rl.hosts import exits, watched
from torchtitan_rl.hosts.exits import Exit
from torchtitan_rl.hosts.host import LocalProcesses
from torchtitan_rl.platform.worker_main import PARENT_VARIABLE
from torchtitan_rl.supervision import processes
from torchtitan_rl.supervision.calls import ProcessEndedError
from torchtitan_rl.supervision.spawn import spawn_grader
from torchtitan_rl.tasks.sum_digits import SumDigits


def test_a_process_has_ended_before_and_after_it_is_collected():
    child = subprocess.Popen(["sleep", "60"])
    process = psutil.Process(child.pid)
    assert not watched.has_ended(process)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert watched.has_ended(process)
    child.wait()
    assert watched.has_ended(process)
    assert not watched.has_ended(psutil.Process(os.getppid()))  # no child


SPAWN_A_GRADER = """
import asyncio, os
from torchtitan_rl.supervision.spawn import end_all_processes, spawn_grader
from torchtitan_rl.actors.grader import Grader
from torchtitan_rl.tasks.sum_digits import SumDigits

try:
    asyncio.run(spawn_grader(Grader.Config(), SumDigits.Config()))
except TimeoutError as error:
    print(error, flush=True)
end_all_processes()
os._exit(0)
"""


def test_a_worker_that_does_not_start_is_named_with_a_remedy():
    run = subprocess.run(
        [sys.executable, "-c", SPAWN_A_GRADER],
        # Monarch reads it once, when it is imported.
        env={**os.environ, processes.START_SECONDS_VARIABLE: "5ms"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    first, second = run.stdout.splitlines()
    assert first.startswith("the grader's process did not start")
    assert first.endswith("trying once more")
    assert second.startswith("the grader's process did not start")
    assert second.endswith(f"Set {processes.START_SECONDS_VARIABLE}=300s to wait longer")


async def test_a_second_attempt_may_succeed(monkeypatch, capsys):
    real = processes.this_host()
    attempts = []

    async def too_late():
        raise ValueError("statuses: Timeout(60s)")

    def spawn_procs(**arguments):
        attempts.append(arguments["name"])
        if len(attempts) == 1:
            return SimpleNamespace(initialized=too_late())
        return real.spawn_procs(**arguments)

    monkeypatch.setattr(processes, "this_host", lambda: SimpleNamespace(spawn_procs=spawn_procs))
    grader = await spawn_grader(Grader.Config(), SumDigits.Config())
    assert all(map(psutil.Process.is_running, grader.processes))
    assert attempts == ["grader", "grader"]
    assert "Timeout(60s); trying once more" in capsys.readouterr().out
    await grader.stop()


def test_a_worker_whose_parent_died_while_it_started_ends():
    gone = subprocess.Popen(["true"])
    gone.wait()
    worker = subprocess.run(
        [sys.executable, "-m", "torchtitan_rl.platform.worker_main"],
        env={**os.environ, PARENT_VARIABLE: str(gone.pid)},
        capture_output=True,
        timeout=60,
    )
    assert (worker.returncode, worker.stderr) == (1, b"")


PRINT = """
import asyncio
from pathlib import Path

from tests.supervision.actors import Printer
from torchtitan_rl.supervision.spawn import end_all_processes, spawn

async def main():
    printer = await spawn(Printer, env={})
    await printer.actor.say.call_one("hello")
    print(printer.log_file, Path(printer.log_file).read_text().splitlines()[-1])

asyncio.run(main())
end_all_processes()
"""


def test_an_actor_of_a_notebook_is_quiet_and_its_log_goes_with_the_notebook():
    ran = subprocess.run(
        [sys.executable, "-c", PRINT],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stderr == ""  # Monarch says where its own log is
    [line] = ran.stdout.splitlines()
    log, said = line.split()
    assert said == "hello"
    wait_until(lambda: not Path(log).parents[1].exists())


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("command", "how"),
    [("exit 3", "exited with code 3"), ("kill -9 $$", "was killed by signal 9 (SIGKILL)")],
)
def test_how_a_process_ended_is_known_also_if_it_was_collected_first(monkeypatch, command, how):
    real = exits.os.waitid
    for collected in (False, True):
        process = subprocess.Popen(["sh", "-c", f"read line; {command}"], stdin=subprocess.PIPE)

        def waitid(*arguments, collected=collected, process=process):
            if collected:
                process.wait()
            return real(*arguments)

        monkeypatch.setattr(exits.os, "waitid", waitid)
        exit = Exit(process.pid)
        process.stdin.close()
        linux = [int(number) for number in re.findall(r"\d+", platform.release())[:2]]
        if collected and linux < [6, 15]:  # nobody tells it
            assert exit.how == ""
        else:
            wait_until(lambda exit=exit: exit.how == how)
        process.wait()


async def test_if_nobody_has_seen_how_a_process_ended_monarch_is_asked(monkeypatch):
    monkeypatch.setattr(processes, "LAST_REPLY_SECONDS", 0.01)
    monkeypatch.setattr(processes, "WATCH_SECONDS", 0.01)
    child = subprocess.Popen(["true"])
    part = LocalProcesses([child.pid])
    child.wait()

    async def reply():
        await asyncio.sleep(0.2)
        raise SupervisionError("... the process this actor was running on failed: Killed(sig=9)")

    spawned = processes.Spawned(None, None, [part], name="trainer", log_files=("logs/trainer.log",))
    monkeypatch.setattr(LocalProcesses, "ends", {})
    with pytest.raises(ProcessEndedError) as error:
        await spawned.watched(reply())
    assert str(error.value) == (
        "the trainer's process was killed by signal 9 (SIGKILL). Its log: logs/trainer.log. If "
        "nobody killed it, the machine has run out of memory."
    )


END_ALL = """
import os, subprocess, time
from multiprocessing import resource_tracker

import psutil
from torchtitan_rl.supervision.processes import end_all_processes

resource_tracker.ensure_running()
subprocess.Popen(["sleep", "600"])
started = time.monotonic()
end_all_processes()
print(time.monotonic() - started)
[tracker] = psutil.Process().children(recursive=True)
assert tracker.pid == resource_tracker._resource_tracker._pid
"""


def test_the_end_of_a_program_does_not_wait_for_pythons_resource_tracker():
    ran = subprocess.run(
        [sys.executable, "-c", END_ALL], capture_output=True, text=True, timeout=60, check=True
    )
    assert float(ran.stdout) < processes.REAP_SECONDS


USE_A_TERMINAL = """
import asyncio, os
from tests.supervision.actors import TerminalUser
from torchtitan_rl.platform import worker_env
from torchtitan_rl.supervision.spawn import end_all_processes, spawn

async def main():
    user = await spawn(TerminalUser, env=worker_env(1, role="grader"))
    try:
        print(await asyncio.wait_for(user.actor.use.call_one(), 20), flush=True)
    except TimeoutError:
        print(user.processes[0].status(), flush=True)

asyncio.run(main())
end_all_processes()
os._exit(0)
"""


def test_a_worker_that_sets_the_terminal_is_not_stopped_for_it():
    """Workers are background groups of the terminal that a run was started from."""
    ours, theirs = pty.openpty()
    run = subprocess.run(
        [sys.executable, "-c", USE_A_TERMINAL],
        stdin=theirs,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(ours)
    os.close(theirs)
    assert run.stdout == "set it, and read ''\n"
