"""What a controller does with a host that a worker lends: a session, and the calls in it."""

import asyncio
import base64
import contextlib
import fcntl
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from torchtitan_rl.core.errors import describe_error
from torchtitan_rl.core.waiting import cancel
from torchtitan_rl.hosts.addresses import family_of
from torchtitan_rl.hosts.messages import ClosedError, HostError, Messages, reason
from torchtitan_rl.hosts.monarch_worker import READY
from torchtitan_rl.hosts.watched import REAP_SECONDS, WatchedProcesses, has_ended, kill
from torchtitan_rl.platform.janitor import Janitor
from torchtitan_rl.weight_sync.relay import Relay

START_SECONDS = 60.0
"""How long Monarch's server may take to start on a busy machine."""
FOLDER_PREFIX, LOCK = "torchtitan_rl-session-", "lock"
"""Beginning of the names of sessions' folders, and a file in each that its worker holds locked."""
LEAST_SILENCE = 1.0
"""Shortest silence, in seconds, after which a controller may be taken for gone."""
LISTEN_SECONDS = 30.0
"""How long others can try to connect to a port."""
MOST_FETCHES = 64
"""Trainer ranks whose weights are received at once."""


class LentSession:
    """What one controller does with a host, from its connection to its end."""

    def __init__(
        self, address: str, messages: Messages, *, run: str, owner: str, silence: float
    ) -> None:
        self.run, self.owner = run, owner
        self.since = time.strftime("%H:%M:%S")
        self._address, self._messages = address, messages
        self._silence = max(silence, LEAST_SILENCE)
        self._folder = Janitor(Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX)))
        # Held until the folder is removed; the kernel lifts it if this process is killed.
        self._lock = os.open(self._folder.folder / LOCK, os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._watched: dict[int, WatchedProcesses] = {}
        self._server: asyncio.subprocess.Process | None = None
        self._relay: Relay | None = None
        # Threads of their own: one that waits for weights must not keep others from ending.
        self._fetching = ThreadPoolExecutor(MOST_FETCHES, "fetch")
        self._goodbye = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: dict[str, Callable[..., Awaitable[Any]]] = {
            "ping": self._ping,
            "free_port": self._free_port,
            "reach": self._reach,
            "has_text": self._has_text,
            "file_sizes": self._file_sizes,
            "write_file": self._write_file,
            "open": self._open,
            "watch": self._watch,
            "end": self._end,
            "relay": self._start_relay,
            "fetch": self._fetch,
        }

    # ---- beginning and end ----------------------------------------------------------------------

    async def start(self) -> str:
        """Start Monarch's server; returns where it is."""
        log = self._folder.folder / "monarch.log"
        command = (sys.executable, "-m", "torchtitan_rl.hosts.monarch_worker")
        with log.open("w") as errors:
            self._server = await asyncio.create_subprocess_exec(
                *command,
                self._address,
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert self._server.stdout is not None
        try:
            line = await asyncio.wait_for(self._server.stdout.readline(), START_SECONDS)
        except TimeoutError:
            line = b""
        if not line.decode().startswith(READY):
            said = log.read_text()[-2000:] or f"nothing within {START_SECONDS:.0f} s"
            raise HostError(f"Monarch's server does not start; it says: {said}")
        return line.decode().removeprefix(READY).strip()

    async def serve(self) -> str:
        """Answer the controller until it leaves; returns why it did."""
        assert self._server is not None
        serving = asyncio.create_task(self._serve())
        ending = asyncio.create_task(self._server.wait())
        tasks: set[asyncio.Task[Any]] = {serving, ending}
        try:
            while not serving.done() and not ending.done():
                await asyncio.wait(
                    tasks, timeout=self._silence / 10, return_when=asyncio.FIRST_COMPLETED
                )
                if self._messages.silent_for() > self._silence:
                    return f"the controller has been silent for {self._silence:g} s"
            return serving.result() if serving.done() else "Monarch's server has ended"
        finally:
            await cancel(*tasks)

    async def end(self, why: str) -> None:
        """Kill everything that was started in this session, and remove its files.

        A controller that has said goodbye waits for that. Any other is told before that it loses
        the host: else it would see its actors die for no reason.
        """
        if not self._goodbye:
            self._messages.send(leaving=why)
            await self._messages.close()
        for task in self._tasks:
            task.cancel()
        spared = await asyncio.to_thread(_kill_all)
        if self._server is not None:  # a child that asyncio itself collects
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._server.wait(), REAP_SECONDS)
        if self._relay is not None:
            await asyncio.to_thread(self._relay.close)
        self._fetching.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._folder.close)
        os.close(self._lock)
        await asyncio.to_thread(psutil.wait_procs, spared, timeout=REAP_SECONDS)
        await asyncio.to_thread(_collect_orphans)
        self._messages.abort()

    async def _serve(self) -> str:
        try:
            while True:
                message = await self._messages.receive()
                if message.get("call") == "bye":
                    self._goodbye = True
                    return "the run has ended"
                self._begin(self._answer(message))
        except ClosedError as error:
            return str(error)

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: dict[str, Any]) -> None:
        number, call = message.get("id"), str(message.get("call"))
        try:
            if call not in self._calls:
                raise HostError(f"a worker cannot {call!r}")
            value = await self._calls[call](**message.get("with", {}))
            self._messages.send(id=number, value=value)
        except Exception as error:  # whatever it is, the controller is to know
            self._messages.send(id=number, error=describe_error(error))

    # ---- calls ----------------------------------------------------------------------------------

    async def _ping(self) -> None:
        """Nothing: to answer is all."""

    async def _free_port(self, *, listen: bool = False) -> int:
        """A port of the host's address that nobody listens at. `listen`: for a while somebody does,
        so that others can try to connect."""
        server = socket.create_server((self._address, 0), family=family_of(self._address))
        port = int(server.getsockname()[1])
        if listen:
            asyncio.get_running_loop().call_later(LISTEN_SECONDS, server.close)
        else:
            server.close()
        return port

    async def _reach(self, *, address: str, port: int, within: float) -> str:
        """Why a port of another host cannot be reached from this one; empty: it can."""
        try:
            connecting = asyncio.open_connection(address, port)
            _, writer = await asyncio.wait_for(connecting, within)
        except TimeoutError:
            return f"no answer within {within:g} s"
        except OSError as error:
            return reason(error)
        writer.close()
        return ""

    async def _has_text(self, *, path: str, text: str) -> bool:
        """Whether a file is there and has this text: whether a folder is shared."""
        with contextlib.suppress(OSError, UnicodeError):
            return await asyncio.to_thread(Path(path).read_text) == text
        return False

    async def _file_sizes(self, *, folder: str) -> dict[str, int]:
        """Sizes of the files in a folder; nothing if it is not there."""
        return await asyncio.to_thread(_sizes, Path(folder))

    async def _write_file(self, *, folder: str, name: str, data: str, more: bool) -> str:
        """Write a file to a folder of this session, or `more` to its end; returns the path of the
        folder."""
        own, file = self._inside(folder), self._inside(f"{folder}/{name}")
        await asyncio.to_thread(_write, file, base64.b64decode(data), more)
        return str(own)

    async def _open(self, *, name: str, log_file: str, temporary: bool) -> dict[str, str]:
        """Where a new actor prints to, and the folder of its temporary files, if it has one."""
        return await asyncio.to_thread(self._opened, name, Path(log_file), temporary)

    def _opened(self, name: str, log_file: Path, temporary: bool) -> dict[str, str]:
        if not os.access(log_file.parent, os.W_OK):
            log_file = self._inside("logs") / log_file.name
            log_file.parent.mkdir(exist_ok=True)
        made = tempfile.mkdtemp(prefix=f"{name}-", dir=self._folder.folder) if temporary else ""
        return {"log_file": str(log_file), "temporary": made}

    async def _watch(self, *, number: int, pids: list[int]) -> None:
        """Tell the controller when one of these processes ends."""
        loop = asyncio.get_running_loop()

        def on_exit(rank: int, how: str) -> None:
            tell = partial(self._messages.send, ended=number, rank=rank, how=how)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(tell)

        children = await asyncio.to_thread(psutil.Process().children, recursive=True)
        if strangers := set(pids) - {process.pid for process in children}:
            raise HostError(f"processes {sorted(strangers)} have ended, or are not of this run")
        self._watched[number] = WatchedProcesses(pids, on_exit=on_exit)

    async def _end(self, *, number: int, temporary: str = "") -> None:
        """End an actor's processes and what they have started."""
        if (known := self._watched.pop(number, None)) is not None:
            await known.end()
        if temporary:
            folder = self._inside(Path(temporary).name)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _start_relay(self) -> dict[str, Any]:
        """Where other hosts fetch weights from this one."""
        if self._relay is None:
            self._relay = Relay(self._address)
        return self._relay.location

    async def _fetch(self, *, order: dict[str, Any]) -> dict[str, Any]:
        """Where on this host the weights are that an order names, when they have come."""
        await self._start_relay()
        assert self._relay is not None
        return await asyncio.get_running_loop().run_in_executor(
            self._fetching, self._relay.answer, order
        )

    def _inside(self, name: str) -> Path:
        """A path in this session's folder; raises HostError if it leaves it."""
        root = self._folder.folder.resolve()
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise HostError(f"{name!r} is not in the session's folder")
        return path


def remove_left_folders() -> None:
    """Remove folders of sessions whose worker was killed with its machine."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError), (folder / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if a worker holds it
            shutil.rmtree(folder, ignore_errors=True)


def _kill_all() -> set[psutil.Process]:
    """Kill all processes that descend from this one, but cleaners, which are returned; also those
    that were started while others were killed."""
    deadline = time.monotonic() + REAP_SECONDS
    while True:
        processes = psutil.Process().children(recursive=True)
        spared = kill(processes)
        left = [process for process in set(processes) - spared if not has_ended(process)]
        if not left or time.monotonic() > deadline:
            return spared
        time.sleep(0.02)  # not `wait_procs`, which would collect what asyncio waits for


def _collect_orphans() -> None:
    """Collect what was killed, so that not even a zombie of it is left: this process has become the
    parent of what its children had started."""
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is not None:
            pass


def _sizes(folder: Path) -> dict[str, int]:
    with contextlib.suppress(OSError):
        return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    return {}


def _write(file: Path, data: bytes, more: bool) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab" if more else "wb") as opened:
        opened.write(data)
