"""The worker of a host: lends its machine to one controller at a time.

    controller ──secret──► worker ──starts──► Monarch's server ──starts──► actors' processes
               ◄──facts──         ──watches, ends─────────────────────────►

A session begins when a controller has proved that it knows the secret, and ends when the controller
says so, closes the connection, or is silent. Everything that was started in it is killed then: a
controller that is gone, or whose network is cut, has replaced this host's actors meanwhile.
"""

import asyncio
import base64
import contextlib
import ipaddress
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

import torchtitan_rl
from torchtitan_rl.core.errors import describe_error
from torchtitan_rl.hosts.facts import HostFacts
from torchtitan_rl.hosts.families import REAP_SECONDS, Family, has_ended, kill
from torchtitan_rl.hosts.messages import (
    HANDSHAKE_SECONDS,
    LONGEST,
    ClosedError,
    HostError,
    Messages,
    reason,
)
from torchtitan_rl.hosts.monarch_worker import READY, family_of
from torchtitan_rl.hosts.secret import is_proof, new_number, proof
from torchtitan_rl.platform.janitor import Janitor
from torchtitan_rl.weight_sync.relay import Relay

USUAL_PORT = 26600
START_SECONDS = 60.0
"""How long Monarch's server may take to start on a busy machine."""
LEAST_SILENCE = 1.0
"""Shortest silence, in seconds, after which a controller may be taken for gone."""
MOST_FETCHES = 64
"""Trainer ranks whose weights are received at once."""
MOST_STRANGERS = 32
"""Connections that have not proved anything yet, at once; the oldest makes room for a new one."""


class WorkerError(HostError):
    """A worker cannot be started as it was asked to."""


class Worker:
    """Listens at an address, and serves one session at a time.

    Example:
        worker = Worker("10.0.0.7", 26600, secret=load_secret(), facts=examine_host("10.0.0.7"))
        await worker.run()
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        secret: str,
        facts: HostFacts,
        once: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        """`once`: end after the first session. `say` is told what happens."""
        self.address, self.port = address, port
        self._secret, self._facts, self._once, self._say = secret, facts, once, say
        self._session: Session | None = None
        self._strangers: list[Messages] = []
        self._changing = asyncio.Lock()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Serve until `stop`, or until the first session has ended if there is to be but one."""
        server = await self.listen()
        self._say(f"listening at {self.address} port {self.port}")
        async with server:
            await self._ended.wait()
        await self._end_session("the worker ends")

    async def listen(self) -> asyncio.Server:
        """Listen; `port` is known from now on if it was 0."""
        try:
            server = await asyncio.start_server(
                self._serve, self.address, self.port, family=family_of(self.address)
            )
        except OSError as error:
            raise WorkerError(
                f"cannot listen at {self.address} port {self.port} ({error.strerror}): is another "
                "worker running there? Choose another with --address <address>:<port>"
            ) from error
        self.port = server.sockets[0].getsockname()[1]
        return server

    def stop(self) -> None:
        """Have `run` return, after ending the session that there is."""
        self._ended.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        messages = Messages(reader, writer)
        self._strangers.append(messages)
        if len(self._strangers) > MOST_STRANGERS:
            self._strangers[0].abort()
        try:
            asked = await asyncio.wait_for(self._admit(messages), 2 * HANDSHAKE_SECONDS)
        except (ClosedError, TimeoutError, KeyError, TypeError, ValueError):
            await messages.close()
            return
        finally:
            self._strangers.remove(messages)
        session = await self._begin(messages, asked)
        if session is None:
            await messages.close()
            return
        why = await session.serve()
        if self._session is session:
            await self._end_session(why)
            if self._once:
                self.stop()

    async def _admit(self, messages: Messages) -> dict[str, Any]:
        """What a controller asks for that has proved that it knows the secret."""
        own = new_number()
        messages.send(worker=own, version=torchtitan_rl.__version__)
        asked = await messages.receive(HANDSHAKE_SECONDS)
        theirs = str(asked["controller"])
        if not is_proof(asked.get("proof"), self._secret, "controller", theirs, own):
            messages.send(error="its secret is another one than the controller's")
            raise ClosedError("the controller does not know the secret")
        messages.longest = LONGEST
        messages.send(proof=proof(self._secret, "worker", theirs, own))
        return {"run": str(asked["run"]), "silence": float(asked["silence"]), "id": theirs} | {
            "owner": str(asked["owner"])
        }

    async def _begin(self, messages: Messages, asked: dict[str, Any]) -> "Session | None":
        """A session for an admitted controller; None if another one has this worker."""
        async with self._changing:
            current = self._session
            if current and current.owner == asked["owner"]:  # it has lost its last connection
                await self._end_locked("its controller has come again")
            elif current:
                messages.send(error=f"it works for run {current.run} since {current.since}")
                return None
            session = Session(self.address, messages, **{k: asked[k] for k in _ASKED})
            try:
                place = await session.start()
            except HostError as error:
                messages.send(error=str(error))
                await session.end()
                return None
            self._session = session
            messages.send(monarch=place, facts=self._facts.to_json())
            self._say(f"run {session.run} of {messages.other_address} begins")
            return session

    async def _end_session(self, why: str) -> None:
        async with self._changing:
            await self._end_locked(why)

    async def _end_locked(self, why: str) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.end()
            self._say(f"run {session.run} ends here: {why}")


_ASKED = ("run", "owner", "silence")


class Session:
    """What one controller does with a host."""

    def __init__(
        self, address: str, messages: Messages, *, run: str, owner: str, silence: float
    ) -> None:
        self.run, self.owner = run, owner
        self.since = time.strftime("%H:%M:%S")
        self._address, self._messages = address, messages
        self._silence = max(silence, LEAST_SILENCE)
        self._folder = Janitor(Path(tempfile.mkdtemp(prefix="torchtitan_rl-session-")))
        self._families: dict[int, Family] = {}
        self._server: asyncio.subprocess.Process | None = None
        self._relay: Relay | None = None
        # Threads of their own: one that waits for weights must not keep others from ending.
        self._fetching = ThreadPoolExecutor(MOST_FETCHES, "fetch")
        self._listeners: list[socket.socket] = []
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
            "end": self._end_family,
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
                cwd=os.getcwd(),
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
        serving = asyncio.create_task(self._serve())
        assert self._server is not None
        ending = asyncio.create_task(self._server.wait())
        try:
            while not serving.done() and not ending.done():
                await asyncio.wait({serving, ending}, timeout=self._silence / 10)
                if self._messages.silent_for() > self._silence:
                    return f"the controller has been silent for {self._silence:g} s"
            return serving.result() if serving.done() else "Monarch's server has ended"
        finally:
            serving.cancel()
            ending.cancel()

    async def end(self) -> None:
        """Kill everything that was started in this session, remove its files, and then close the
        connection: a controller that has said goodbye waits for that."""
        for task in self._tasks:
            task.cancel()
        spared = await asyncio.to_thread(_kill_all)
        if self._server is not None:  # a child that asyncio itself collects
            await self._server.wait()
        for listener in self._listeners:
            listener.close()
        if self._relay is not None:
            await asyncio.to_thread(self._relay.close)
        self._fetching.shutdown(wait=False, cancel_futures=True)
        self._folder.close()
        await asyncio.to_thread(psutil.wait_procs, spared, timeout=REAP_SECONDS)
        await asyncio.to_thread(_collect_orphans)
        self._messages.abort()

    async def _serve(self) -> str:
        try:
            while True:
                message = await self._messages.receive()
                if message.get("call") == "bye":
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
        """A port of the host's address that nobody listens at. `listen`: until `reach` of others
        has been tried, somebody does, and accepts."""
        server = socket.create_server((self._address, 0), family=family_of(self._address))
        port = int(server.getsockname()[1])
        if listen:
            self._listeners.append(server)
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
        found = Path(folder)
        with contextlib.suppress(OSError):
            return {path.name: path.stat().st_size for path in found.iterdir() if path.is_file()}
        return {}

    async def _write_file(self, *, folder: str, name: str, data: str) -> str:
        """Write a small file to a folder of this session; returns the folder's path."""
        own = self._inside(folder)
        own.mkdir(parents=True, exist_ok=True)
        (self._inside(f"{folder}/{name}")).write_bytes(base64.b64decode(data))
        return str(own)

    async def _open(self, *, name: str, log_file: str, temporary: bool) -> dict[str, str]:
        """Where a new actor prints to, and the folder of its temporary files, if it has one."""
        if not os.access(Path(log_file).parent, os.W_OK):
            logs = self._inside("logs")
            logs.mkdir(exist_ok=True)
            log_file = str(logs / Path(log_file).name)
        made = tempfile.mkdtemp(prefix=f"{name}-", dir=self._folder.folder) if temporary else ""
        return {"log_file": log_file, "temporary": made}

    async def _watch(self, *, family: int, pids: list[int]) -> None:
        """Tell the controller when one of these processes ends."""
        loop = asyncio.get_running_loop()

        def on_exit(rank: int, how: str) -> None:
            tell = partial(self._messages.send, ended=family, rank=rank, how=how)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(tell)

        own = {process.pid for process in psutil.Process().children(recursive=True)}
        if strangers := set(pids) - own:
            raise HostError(f"processes {sorted(strangers)} have ended, or are not of this run")
        self._families[family] = Family(pids, on_exit=on_exit)

    async def _end_family(self, *, family: int, temporary: str = "") -> None:
        """End an actor's processes and what they have started."""
        if (known := self._families.pop(family, None)) is not None:
            await known.end()
        if temporary:
            shutil.rmtree(self._inside(Path(temporary).name), ignore_errors=True)

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


def _kill_all() -> set[psutil.Process]:
    """Kill all processes that descend from this one, but cleaners, which are returned; also those
    that were started while others were killed."""
    deadline = time.monotonic() + REAP_SECONDS
    while True:
        family = psutil.Process().children(recursive=True)
        spared = kill(family)
        left = [process for process in set(family) - spared if not has_ended(process)]
        if not left or time.monotonic() > deadline:
            return spared
        time.sleep(0.02)  # not `wait_procs`, which would collect what asyncio waits for


def _collect_orphans() -> None:
    """Collect what was killed, so that not even a zombie of it is left: this process has become the
    parent of what its children had started."""
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is not None:
            pass


def listening_address(text: str, *, allow_public: bool) -> tuple[str, int]:
    """IP address and port of `<address>[:<port>]`; a name is resolved.

    Raises WorkerError for an address that the whole world may reach, unless that is allowed.

    Example:
        >>> listening_address("127.0.0.1:4000", allow_public=False)
        ('127.0.0.1', 4000)
    """
    name, port = split_address(text)
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise WorkerError(
            f"the name {name!r} is not known here ({error}): give an IP address of this machine"
        ) from error
    address = str(found[0][4][0])
    own = ipaddress.ip_address(address)
    if (own.is_global or own.is_unspecified) and not allow_public:
        what = "all addresses of this machine" if own.is_unspecified else f"the public {address}"
        raise WorkerError(
            f"a worker at {what} would run whatever somebody sends who has the secret, and nothing "
            "is encrypted: give an address of a private network, or add --allow_public behind a "
            "firewall"
        )
    if own.is_unspecified:
        raise WorkerError(
            f"others cannot reach {address}: give the address by which they reach this machine"
        )
    return address, port


def split_address(text: str, *, usual: int = USUAL_PORT) -> tuple[str, int]:
    """Name and port of `<name>[:<port>]`; an IPv6 address with a port is in brackets. `usual` is
    the port if none is given.

    Example:
        >>> split_address("node7:4000"), split_address("node7"), split_address("[::1]:4000")
        (('node7', 4000), ('node7', 26600), ('::1', 4000))
    """
    name, port = text, ""
    if text.startswith("["):
        name, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") == 1:
        name, _, port = text.partition(":")
    if not name or (port and not (port.isdigit() and 0 <= int(port) < 65536)):
        raise WorkerError(f"{text!r} is no <address> and no <address>:<port>")
    return name, int(port) if port else usual
