"""Hosts as the rest of the library sees them: this one, or one that a worker lends."""

import asyncio
import base64
import contextlib
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from torchtitan_rl.core.waiting import together
from torchtitan_rl.hosts.addresses import join_address
from torchtitan_rl.hosts.facts import HostFacts
from torchtitan_rl.hosts.link import HostLostError, Link, LinkThread, Session
from torchtitan_rl.hosts.messages import HostError
from torchtitan_rl.hosts.watched import WatchedProcesses
from torchtitan_rl.platform import Compute, machine_id
from torchtitan_rl.platform.janitor import Janitor

ASK_SECONDS = 60.0
"""How long a host may take to answer, unless more is to be done there."""
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot")
"""Endings of files with weights, which are not sent as messages."""
SMALL, PIECE = 64 << 20, 1 << 20
"""Most bytes of a file that is sent as messages, and of one message of it."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Where an actor that is about to be started on a host finds its files."""

    log_file: str
    temporary: str = ""
    """Folder of temporary files; empty: it has none of its own."""
    session: Session | None = None
    """The session of the host in which it is started; None on this host."""
    janitor: Janitor | None = None
    """Remover of the folder of temporary files, if that is on this host."""


class HostProcesses(Protocol):
    """Processes of an actor on one host."""

    processes: list[psutil.Process]
    """Processes that are on this machine; empty for another host's."""

    @property
    def alive(self) -> bool:
        """Whether none has ended, as far as is known here."""
        ...

    @property
    def ends(self) -> dict[int, str]:
        """How processes have ended that have, by their number on the host."""
        ...

    @property
    def lost(self) -> str:
        """Why the host is lost; empty while it is not."""
        ...

    async def settle(self) -> None:
        """Return when it is known whether the host is lost."""
        ...

    def members(self) -> set[psutil.Process]:
        """The processes and all that they have started, as far as they are on this machine."""
        ...

    async def end(self, members: set[psutil.Process]) -> None:
        """End them and all that they have started."""
        ...


class Host(Protocol):
    """A machine on which actors live."""

    name: str

    @property
    def address(self) -> str:
        """Address by which the other hosts of the run reach it."""
        ...

    @property
    def controller_address(self) -> str:
        """Address by which it reaches this process; empty: they are on one machine."""
        ...

    @property
    def facts(self) -> HostFacts | None:
        """Facts of the machine; None: it is this one, and nothing was asked."""
        ...

    @property
    def compute(self) -> Compute | None:
        """What it computes with; None: as this machine."""
        ...

    @property
    def machine(self) -> str:
        """Equal for hosts that share memory."""
        ...

    @property
    def monarch(self) -> str:
        """Address of Monarch's server; empty: processes are started by this process itself."""
        ...

    async def ready(self) -> None:
        """Return when actors can be started there."""
        ...

    async def open(self, name: str, log_file: str, *, temporary: bool) -> Opened:
        """Prepare files for an actor that is about to be started."""
        ...

    async def settle(self, opened: Opened) -> None:
        """Return when it is known that the host is not lost; raises HostLostError if it is."""
        ...

    async def watch(self, pids: Sequence[int], opened: Opened) -> HostProcesses:
        """Watch the processes that an actor was started on."""
        ...


class ThisHost:
    """The machine that this process runs on."""

    name = "this host"
    address = "127.0.0.1"
    controller_address = ""
    facts = None
    compute = None
    monarch = ""

    @property
    def machine(self) -> str:
        return machine_id()

    async def ready(self) -> None:
        """Nothing: this host is."""

    async def open(self, name: str, log_file: str, *, temporary: bool) -> Opened:
        if not temporary:
            return Opened(log_file)
        # If nothing is started after all, the folder is removed with this object.
        janitor = Janitor(Path(tempfile.mkdtemp(prefix="torchtitan_rl-")))
        return Opened(log_file, str(janitor.folder), janitor=janitor)

    async def settle(self, opened: Opened) -> None:
        """Nothing: this host is not lost."""

    async def watch(self, pids: Sequence[int], opened: Opened) -> "LocalProcesses":
        return LocalProcesses(pids, opened.janitor)


class LocalProcesses(WatchedProcesses):
    """Processes of an actor on this host."""

    lost = ""

    def __init__(self, pids: Sequence[int], temporary: Janitor | None = None) -> None:
        super().__init__(pids, temporary=temporary)

    async def settle(self) -> None:
        """Nothing: this host is not lost."""


THIS_HOST = ThisHost()


class RemoteHost:
    """A machine that a worker lends, as long as the link to it holds."""

    def __init__(self, name: str, link: Link, thread: LinkThread) -> None:
        self.name, self._link, self._thread = name, link, thread
        self._numbers = itertools.count()
        self._waiters: set[asyncio.Future[None]] = set()
        self._last: Session | None = None
        link.on_change(self._on_change)

    def __str__(self) -> str:
        return f"host {self.name}"

    @property
    def address(self) -> str:
        return self._link.address

    @property
    def worker(self) -> str:
        """Address and port of its worker."""
        return join_address(self._link.address, self._link.port)

    @property
    def controller_address(self) -> str:
        return self.session.own_address

    @property
    def up(self) -> bool:
        """Whether there is a connection."""
        return self._link.session is not None

    @property
    def refused(self) -> bool:
        """Whether its worker does not want this run; `why_not_up` says why."""
        return self._link.refused

    @property
    def why_not_up(self) -> str:
        return self._link.error

    @property
    def session(self) -> Session:
        """The connection that there is; raises HostLostError without one."""
        session = self._link.session
        if session is None:
            raise HostLostError(f"{self} is lost: {self.why_not_up}")
        return session

    @property
    def facts(self) -> HostFacts:
        """Facts as the worker has last said them."""
        session = self._link.session or self._last
        if session is None:
            raise HostLostError(f"{self} has not answered yet: {self.why_not_up}")
        return session.facts

    @property
    def compute(self) -> Compute:
        return self.facts.compute

    @property
    def machine(self) -> str:
        return self.facts.machine

    @property
    def monarch(self) -> str:
        return self.session.monarch

    async def ready(self) -> None:
        """Return when there is a connection, however long that takes."""
        while not self.up:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                if not self.up:
                    await waiter
            finally:
                self._waiters.discard(waiter)

    async def ask(
        self,
        call: str,
        *,
        seconds: float = ASK_SECONDS,
        session: Session | None = None,
        **values: Any,
    ) -> Any:
        """What the worker answers; errors name the host."""
        asked = session or self.session
        try:
            return await self._thread.run(self._link.ask(asked, call, seconds, **values))
        except HostLostError as error:
            raise HostLostError(f"{self} is lost: {error}") from error
        except Exception as error:
            error.add_note(f"on {self}")
            raise

    async def open(self, name: str, log_file: str, *, temporary: bool) -> Opened:
        session = self.session
        made = await self.ask(
            "open", session=session, name=name, log_file=log_file, temporary=temporary
        )
        return Opened(made["log_file"], made["temporary"], session)

    async def settle(self, opened: Opened) -> None:
        await self.ask("ping", session=opened.session)

    async def watch(self, pids: Sequence[int], opened: Opened) -> "RemoteProcesses":
        assert opened.session is not None
        number = next(self._numbers)
        await self.ask("watch", session=opened.session, number=number, pids=list(pids))
        return RemoteProcesses(self, opened.session, number, opened.temporary)

    async def free_port(self) -> int:
        """A port of its address that nobody listens at."""
        return await self.ask("free_port")

    async def has_text(self, path: Path, text: str) -> bool:
        """Whether it has a file with this text."""
        return await self.ask("has_text", path=str(path), text=text)

    async def has_files_of(self, folder: Path) -> bool:
        """Whether it has every file that this machine has in a folder, of the same size."""
        there = await self.ask("file_sizes", folder=str(folder))
        here = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
        return bool(here) and here.items() <= there.items()

    async def send_small_files(self, folder: Path, **others: bytes) -> str:
        """Send the files of a folder, except weights, and others, by name; returns the path of the
        copy. The worker removes it when the run ends."""
        small = (p for p in folder.iterdir() if p.is_file() and p.stat().st_size <= SMALL)
        files = {p.name: p.read_bytes() for p in small if p.suffix not in WEIGHT_FILES} | others
        own, at = f"model-{next(self._numbers)}-{folder.name}", ""
        for name, content in files.items():
            for start in range(0, max(len(content), 1), PIECE):
                data = base64.b64encode(content[start : start + PIECE]).decode()
                at = await self.ask("write_file", folder=own, name=name, data=data, more=start > 0)
        return at

    def _on_change(self) -> None:
        """Wake who waits for the host; called on the link's thread."""
        self._last = self._link.session or self._last
        if not self.up:
            return
        for waiter in list(self._waiters):
            waiter.get_loop().call_soon_threadsafe(_wake, waiter)


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


class RemoteProcesses:
    """Processes of an actor on another host, known by what its worker says."""

    processes: list[psutil.Process] = []

    def __init__(self, host: RemoteHost, session: Session, number: int, temporary: str) -> None:
        self._host, self._session = host, session
        self._number, self._temporary = number, temporary

    @property
    def alive(self) -> bool:
        return not self._session.lost and not self._session.ends.get(self._number)

    @property
    def ends(self) -> dict[int, str]:
        ended = dict(self._session.ends.get(self._number, {}))  # another thread adds to it
        return {rank: how for rank, how in ended.items() if how}

    @property
    def lost(self) -> str:
        return f"{self._host}: {self._session.lost}" if self._session.lost else ""

    async def settle(self) -> None:
        with contextlib.suppress(HostError):
            await self._host.ask("ping", session=self._session)

    def members(self) -> set[psutil.Process]:
        return set()

    async def end(self, members: set[psutil.Process]) -> None:
        """End them; those of a lost host are ended by its worker."""
        with contextlib.suppress(HostLostError):
            await self._host.ask(
                "end", session=self._session, number=self._number, temporary=self._temporary
            )


async def check_reachable(hosts: Sequence[RemoteHost]) -> str:
    """Why some of the hosts could not connect to the first; empty: they can. For ranks that are
    about to meet there: torch would wait for half an hour."""
    first, *others = hosts
    if not others:
        return ""
    port = await first.ask("free_port", listen=True)
    found = await together(
        *(h.ask("reach", address=first.address, port=port, within=5.0) for h in others)
    )
    return "; ".join(
        f"{host} cannot connect to {first} ({first.address}): {why}"
        for host, why in zip(others, found, strict=True)
        if why
    )
