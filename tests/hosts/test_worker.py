"""A worker and the controllers that connect to it, on this host's loopback."""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from torchtitan_rl import __version__
from torchtitan_rl.config.cluster import ClusterConfig
from torchtitan_rl.hosts import cluster as cluster_module
from torchtitan_rl.hosts import secret as secret_module
from torchtitan_rl.hosts.addresses import AddressError, listening_address, split_address
from torchtitan_rl.hosts.cluster import Cluster
from torchtitan_rl.hosts.launchers import started, torchrun
from torchtitan_rl.hosts.launchers.launcher import LaunchError
from torchtitan_rl.hosts.link import HostLostError
from torchtitan_rl.hosts.messages import HostError
from torchtitan_rl.hosts.session import FOLDER_PREFIX, LOCK

SECRET = "a secret for tests"


class LentHost:
    """A worker in a process of its own."""

    def __init__(self, *options: str, port: int = 0) -> None:
        address = f"127.0.0.1:{port}"
        command = [sys.executable, "-m", "torchtitan_rl", "worker", "--address", address, *options]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE if "--stdin" in options else subprocess.DEVNULL,
            text=True,
            env={**os.environ, secret_module.VARIABLE: SECRET},
        )
        if "--stdin" in options:
            assert self.process.stdin is not None
            self.process.stdin.write(f"{SECRET}\n")
            self.process.stdin.flush()
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        self.port = int(self.said.split()[-1])

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.port}"

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def host():
    lent = LentHost()
    yield lent
    lent.close()


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setenv(secret_module.VARIABLE, SECRET)
    monkeypatch.setattr(cluster_module, "LOOK_SECONDS", 0.02)


def cluster(*places: str, run: str = "mine", silence: float = 2.0, wait: float = 20.0) -> Cluster:
    config = ClusterConfig(
        launcher="hosts", hosts=places, silence_seconds=silence, wait_seconds=wait
    )
    return Cluster(config, run=run)


async def soon(condition, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_session_starts_and_ends_everything(host, tmp_path):
    async with cluster(host.place) as run:
        [lent] = run.remote
        assert lent.facts.compute.device == "cpu"
        assert lent.facts.compute.cores == len(os.sched_getaffinity(0))
        assert lent.facts.interface == "lo"
        assert lent.monarch.startswith("service<")
        assert f"@tcp://{lent.address}:" in lent.monarch
        opened = await lent.open("trainer", str(tmp_path / "trainer.log"), temporary=True)
        assert opened.log_file == str(tmp_path / "trainer.log")
        assert Path(opened.temporary).is_dir()
        elsewhere = await lent.open("trainer", "/not/there/trainer.log", temporary=False)
        assert Path(elsewhere.log_file).parent.is_dir()
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(b"weights")
        copy = Path(await lent.send_small_files(tmp_path))
        assert [path.name for path in copy.iterdir()] == ["config.json"]
        assert await lent.has_files_of(tmp_path)
        (tmp_path / "file").write_text("text")
        assert await lent.has_text(tmp_path / "file", "text")
        assert not await lent.has_text(tmp_path / "file", "other")
        port = await lent.free_port()
        assert 0 < port < 65536
        with pytest.raises(HostError, match="have ended, or are not of this run"):
            await lent.watch([os.getpid()], opened)
        with pytest.raises(HostError, match=r"not in the session's folder"):
            await lent.ask("write_file", folder="../..", name="x", data="", more=False)
        with pytest.raises(HostError, match="a worker cannot 'dance'"):
            await lent.ask("dance")
        assert len(host.children()) >= 1
    await soon(lambda: not host.children())
    assert not copy.exists()
    assert not Path(opened.temporary).exists()
    async with cluster(host.place, run="again"):  # and lends its machine once more
        pass


async def test_a_controller_that_is_silent_or_gone_costs_the_host_nothing(host):
    """Killed: the kernel closes its connection. Stopped: nobody does."""
    code = (
        "import asyncio, sys\n"
        "from tests.hosts.test_worker import cluster\n"
        "async def main():\n"
        f"    async with cluster({host.place!r}, run='other'):\n"
        "        print('connected', flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    for number in (signal.SIGKILL, signal.SIGSTOP):
        other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "connected\n"
        with pytest.raises(HostError, match="it works for run other since"):
            async with cluster(host.place, wait=0.5):
                pass
        other.send_signal(number)
        await soon(lambda: not host.children())
        async with cluster(host.place):  # it is free for another run
            pass
        other.kill()
        other.communicate()


async def test_a_host_that_is_silent_or_gone_is_lost_and_comes_back(host):
    async with cluster(host.place) as run:
        [lent] = run.remote
        first = lent.session
        asking = asyncio.create_task(lent.ask("free_port", session=first))
        await asking
        os.kill(host.process.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(lent.ask("free_port"))
        with pytest.raises(HostLostError, match=r"host 127.0.0.1:\d+ is lost: silent for 2 s"):
            await waiting
        assert run.lost == [lent]
        os.kill(host.process.pid, signal.SIGCONT)
        await asyncio.wait_for(lent.ready(), 20)
        assert lent.session is not first
        with pytest.raises(HostLostError):
            await lent.ask("free_port", session=first)

        old = host.children()
        host.close()
        await soon(lambda: not lent.up)
        await soon(lambda: not any(child.is_running() for child in old))
        again = LentHost(port=host.port)
        try:
            await asyncio.wait_for(lent.ready(), 20)
            assert await lent.free_port()
        finally:
            again.close()


async def test_whoever_does_not_know_the_secret_gets_nothing(host, monkeypatch):
    monkeypatch.setenv(secret_module.VARIABLE, "another long secret")
    with pytest.raises(HostError, match="its secret is another one than the controller's"):
        async with cluster(host.place):
            pass
    assert host.children() == []


HOSTILE = (
    b"\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"[1, 2]\n",
    b'{"controller": 1}\n',
    b'{"controller": {}, "proof": [], "run": 1, "owner": 2, "silence": "soon"}\n',
    b"\xff" * 4096 + b"\n",
    b"x" * 100_000,
    b'{"id": 1, "call": "write_file", "with": {}}\n',
)


async def test_strangers_cost_nothing_and_do_not_keep_others_away(host):
    idle = [socket.create_connection(("127.0.0.1", host.port)) for _ in range(40)]
    for said in HOSTILE:
        with socket.create_connection(("127.0.0.1", host.port), timeout=5) as stranger:
            stranger.sendall(said)
            with contextlib.suppress(ConnectionError):
                answer = stranger.makefile("rb").read()
                assert b"monarch" not in answer
    assert host.children() == []
    async with cluster(host.place) as run:
        assert run.remote[0].up
    for connection in idle:
        connection.close()


async def test_one_of_another_version_is_refused_by_both_numbers(monkeypatch):
    async def worker(reader, writer):
        writer.write(json.dumps({"worker": "1", "version": "0.0.1"}).encode() + b"\n")
        await writer.drain()

    server = await asyncio.start_server(worker, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(HostError, match=r"torchtitan_rl 0\.0\.1, and this is .* one version"):
        async with cluster(f"127.0.0.1:{port}"):
            pass
    server.close()


async def test_a_worker_gives_its_controller_up_before_that_gives_it_up():
    """Else what it runs could still be there when others begin to do its work."""
    asked = []

    async def worker(reader, writer):
        writer.write(json.dumps({"worker": "1", "version": __version__}).encode() + b"\n")
        asked.append(json.loads(await reader.readline()))
        writer.close()

    server = await asyncio.start_server(worker, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(HostError, match=r"waited .* the connection was closed"):
        async with cluster(f"127.0.0.1:{port}", silence=20.0, wait=0.3):
            pass
    assert asked[0]["silence"] == pytest.approx(14.0)
    server.close()


async def test_hosts_that_do_not_come_are_named_with_the_reason():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(HostError, match=rf"waited 0 s .* host 127.0.0.1:{port}: Connection refus"):
        async with cluster(f"127.0.0.1:{port}", wait=0.3):
            pass
    with pytest.raises(HostError, match=r"the name of host 'no.such.host' is not known here"):
        async with cluster("no.such.host"):
            pass


async def test_a_folder_that_is_not_shared_is_named(host, tmp_path, monkeypatch):
    async with cluster(host.place) as run:
        await run.check_shared(tmp_path / "run", run.hosts, "the run's folder")
        assert list((tmp_path / "run").iterdir()) == []
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text("{}")
        await run.check_model(run.hosts, tmp_path / "model", "trainer")

        async def sees_nothing(call, **values):
            return {"has_text": False, "file_sizes": {}}[call]

        monkeypatch.setattr(run.remote[0], "ask", sees_nothing)
        with pytest.raises(HostError, match=r"the run's folder is in .*run, which is not the same"):
            await run.check_shared(tmp_path / "run", run.hosts, "the run's folder")
        with pytest.raises(HostError, match=r"the trainer loads .*model, and host .* has other"):
            await run.check_model(run.hosts, tmp_path / "model", "trainer")


def test_a_worker_ends_when_it_is_to(tmp_path):
    told = LentHost()
    told.process.terminate()
    assert told.process.wait(10) == 0
    piped = LentHost("--stdin")
    assert piped.process.stdin is not None
    piped.process.stdin.close()
    assert piped.process.wait(10) == 0
    told.close()
    piped.close()


def test_a_worker_removes_what_killed_ones_have_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    left, held = (tmp_path / f"{FOLDER_PREFIX}{name}" for name in ("left", "held"))
    for folder in (left, held):
        folder.mkdir()
        (folder / LOCK).touch()
    with (held / LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        LentHost().close()
    assert sorted(tmp_path.iterdir()) == [held]


async def test_a_worker_for_one_run_ends_after_it():
    once = LentHost("--once")
    async with cluster(once.place):
        pass
    assert once.process.wait(10) == 0
    once.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0.0.0.0", "all addresses of this machine"),
        ("8.8.8.8:4000", "8.8.8.8 is a public address"),
        ("::", "all addresses of this machine"),
        ("no.such.host", "not known here"),
        ("node:port", "is no <address> and no <address>:<port>"),
    ],
)
def test_an_address_that_the_world_may_reach_is_refused(text, said):
    with pytest.raises(AddressError, match=said):
        listening_address(text, allow_public=False)


def test_a_public_address_is_taken_when_that_is_allowed():
    assert listening_address("8.8.8.8", allow_public=True) == ("8.8.8.8", 26600)
    with pytest.raises(AddressError, match=r"0.0.0.0 is all addresses"):
        listening_address("0.0.0.0", allow_public=True)
    assert split_address("[::1]:4000") == ("::1", 4000)


def test_a_port_that_is_taken_is_named(host):
    env = {**os.environ, secret_module.VARIABLE: SECRET}
    command = [sys.executable, "-m", "torchtitan_rl", "worker", "--address", host.place]
    second = subprocess.run(command, capture_output=True, text=True, env=env)
    assert second.returncode == 2
    assert f"cannot listen at 127.0.0.1 port {host.port}" in second.stderr


async def test_a_worker_that_was_started_is_started_again_where_it_was(monkeypatch):
    monkeypatch.setattr(started, "AGAIN_SECONDS", 0.1)
    worker = torchrun.started_worker("127.0.0.1", 0, SECRET)
    place = await worker.start()
    try:
        async with cluster(place) as run:
            [lent] = run.remote
            [process] = [p for p in psutil.Process().children() if "worker" in p.cmdline()]
            process.kill()
            await soon(lambda: not lent.up)
            await asyncio.wait_for(lent.ready(), 20)
            assert await lent.free_port()
        assert worker.place == place
    finally:
        await worker.stop()
    assert not process.is_running()


async def test_a_command_without_a_worker_is_quoted():
    worker = started.StartedWorker("node7", lambda _port: ["sh", "-c", "echo no such host"], SECRET)
    with pytest.raises(LaunchError, match="host node7: no worker: no such host"):
        await worker.start()
    await worker.stop()


async def test_one_worker_under_two_names_is_refused(host):
    with pytest.raises(HostError, match=r"127.0.0.1:\d+ and localhost:\d+ are one worker"):
        async with cluster(host.place, f"localhost:{host.port}"):
            pass
