"""Runs that wait for hosts: stopped, told why, and gone on with. No machine is needed."""

import asyncio
import os
import signal
import socket
import subprocess
import sys

import pytest

from torchtitan_rl.core.waiting import Interrupted
from torchtitan_rl.hosts.link import HostLostError
from torchtitan_rl.hosts.secret import VARIABLE
from torchtitan_rl.run.launch import MOST_FAILURES, lost_host, outlast_hosts, stop_signals
from torchtitan_rl.supervision.calls import HostGoneError


def started(tmp_path, tiny_model, *options: str) -> "subprocess.Popen[str]":
    """A run of which no host answers."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    command = [sys.executable, "-m", "torchtitan_rl.train", "--module", "tests.hosts.recipes"]
    command += ["--config", "undisturbed", "--output_dir", str(tmp_path), "--run_name", "waits"]
    return subprocess.Popen(
        [*command, "--hosts", f"127.0.0.1:{port}", *options],
        env={**os.environ, VARIABLE: "a secret for tests", "TEST_MODEL": str(tiny_model)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_waits_for_its_hosts_is_stopped_at_once(tmp_path, tiny_model, number):
    run = started(tmp_path, tiny_model)
    assert run.stdout is not None
    said = ""
    while "waiting for host 127.0.0.1" not in said:
        line = run.stdout.readline()
        assert line, said
        said += line
    run.send_signal(number)
    rest, _ = run.communicate(timeout=10)
    assert run.returncode == 130, rest
    assert "stopped; the same command starts again" in rest
    assert "Traceback" not in rest


def test_a_run_whose_hosts_do_not_come_names_them(tmp_path, tiny_model):
    run = started(tmp_path, tiny_model, "--cluster.wait_seconds", "0.5")
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    words = " ".join(said.split())
    assert "waited 0 s (cluster.wait_seconds) for host 127.0.0.1" in words
    assert "Connection refused" in words
    assert "the same command starts again" in words


class Hosts:
    """Hosts that never come back, or at once."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.waited = seconds, 0

    async def wait_for_all(self) -> None:
        self.waited += 1
        await asyncio.sleep(self.seconds)


async def test_what_a_lost_host_has_caused_is_tried_again():
    hosts, errors = Hosts(), [HostGoneError("host a"), HostLostError("host b")]

    async def attempt():
        if errors:
            try:
                raise errors.pop()
            except RuntimeError as error:
                raise RuntimeError("the trainer could not save") from error

    await outlast_hosts(hosts, attempt)
    assert hosts.waited == 2

    async def fail():
        raise RuntimeError("no host is to blame")

    with pytest.raises(RuntimeError, match="no host is to blame"):
        await outlast_hosts(hosts, fail)
    assert hosts.waited == 2


async def test_hosts_that_are_lost_again_and_again_end_a_run_that_gets_nowhere():
    hosts, steps = Hosts(), iter([*range(5), *[5] * 100])

    async def attempt():
        nonlocal done
        done = next(steps)
        raise HostLostError("host a")

    done = -1
    with pytest.raises(HostLostError) as error:
        await outlast_hosts(hosts, attempt, reached=lambda: done)
    assert hosts.waited == 5 + MOST_FAILURES - 1
    assert error.value.__notes__ == [f"{MOST_FAILURES} times, without a new checkpoint"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_the_wait_for_a_lost_host(number):
    async def attempt():
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), number)
        raise HostGoneError("host a")

    task = asyncio.create_task(outlast_hosts(Hosts(600), attempt))
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_run_that_is_stopped_as_its_host_is_lost_was_stopped():
    class Stopped:
        interrupted = asyncio.Event()

    Stopped.interrupted.set()
    with pytest.raises(Interrupted), stop_signals(Stopped()):
        raise HostGoneError("host a")
    with pytest.raises(ValueError, match="another"), stop_signals(Stopped()):
        raise ValueError("another")
    assert lost_host(ValueError()) is None
