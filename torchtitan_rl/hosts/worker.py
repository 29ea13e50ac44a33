"""The worker of a host: lends its machine to one controller at a time.

    controller ──secret──► worker ──starts──► Monarch's server ──starts──► actors' processes
               ◄──facts──         ──watches, ends─────────────────────────►

A session begins when a controller has proved that it knows the secret, and ends when the controller
says so, closes the connection, or is silent. Everything that was started in it is killed then: a
controller that is gone, or whose network is cut, has replaced this host's actors meanwhile.
"""

import asyncio
import contextlib
import errno
from collections.abc import Callable
from dataclasses import dataclass

import torchtitan_rl
from torchtitan_rl.hosts.addresses import AddressError, family_of
from torchtitan_rl.hosts.facts import HostFacts
from torchtitan_rl.hosts.messages import (
    HANDSHAKE_SECONDS,
    LONGEST,
    ClosedError,
    HostError,
    Messages,
)
from torchtitan_rl.hosts.secret import is_proof, new_number, proof
from torchtitan_rl.hosts.session import LentSession, remove_left_folders

MOST_STRANGERS = 32
"""Connections that have not proved anything yet, at once; the oldest make room for new ones."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a controller asks for that has proved that it knows the secret."""

    run: str
    owner: str
    """A random text that is the controller's, also when it has to connect again."""
    silence: float


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
        self._session: LentSession | None = None
        self._strangers: list[Messages] = []
        self._changing = asyncio.Lock()
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Serve until `stop`, or until the first session has ended if there is to be but one."""
        server = await self.listen()
        await asyncio.to_thread(remove_left_folders)
        self._say(f"listening at {self.address} port {self.port}")
        try:
            await self._ended.wait()
        finally:
            server.close()
            await self._end_session(self._session, "its worker ends")

    async def listen(self) -> asyncio.Server:
        """Listen; `port` is known from now on if it was 0."""
        try:
            server = await asyncio.start_server(
                self._serve, self.address, self.port, family=family_of(self.address)
            )
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise AddressError(f"{self.address} is no address of this machine") from error
            raise AddressError(
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
        for oldest in self._strangers[:-MOST_STRANGERS]:
            oldest.abort()
        try:
            wish = await asyncio.wait_for(self._admit(messages), 2 * HANDSHAKE_SECONDS)
        except (ClosedError, TimeoutError, KeyError, TypeError, ValueError):
            await messages.close()
            return
        finally:
            self._strangers.remove(messages)
        session = await self._begin(messages, wish)
        if session is None:
            await messages.close()
            return
        why = "it has failed"
        try:
            why = await session.serve()
        finally:
            await self._end_session(session, why)
        if self._once:
            self.stop()

    async def _admit(self, messages: Messages) -> Wish:
        """What a controller asks for, when it has proved that it knows the secret."""
        own = new_number()
        messages.send(worker=own, version=torchtitan_rl.__version__)
        asked = await messages.receive(HANDSHAKE_SECONDS)
        theirs = str(asked["controller"])
        if not is_proof(asked.get("proof"), self._secret, "controller", theirs, own):
            messages.send(error="its secret is another one than the controller's")
            self._tell(f"refused {messages.other_address}, which has another secret")
            raise ClosedError("the controller does not know the secret")
        messages.longest = LONGEST
        messages.send(proof=proof(self._secret, "worker", theirs, own))
        return Wish(str(asked["run"]), str(asked["owner"]), float(asked["silence"]))

    async def _begin(self, messages: Messages, wish: Wish) -> LentSession | None:
        """A session for an admitted controller; None if another one has this worker."""
        async with self._changing:
            current = self._session
            if current and current.owner == wish.owner:  # it has lost its last connection
                await self._end_locked("its controller has come again")
            elif current:
                messages.send(busy=f"it works for run {current.run} since {current.since}")
                return None
            try:
                session = LentSession(
                    self.address, messages, run=wish.run, owner=wish.owner, silence=wish.silence
                )
            except OSError as error:
                messages.send(error=f"it has no room for a run: {error}")
                return None
            try:
                server = await session.start()
            except (HostError, OSError) as error:
                messages.send(error=str(error))
                await session.end(str(error))
                return None
            self._session = session
            messages.send(monarch=server, facts=self._facts.to_json())
            self._tell(f"run {session.run} of {messages.other_address} begins")
            return session

    async def _end_session(self, session: LentSession | None, why: str) -> None:
        """End a session, unless that was done."""
        async with self._changing:
            if session is self._session:
                await self._end_locked(why)

    async def _end_locked(self, why: str) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.end(why)
            self._tell(f"run {session.run} ends here: {why}")

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a terminal that is gone costs no session
            self._say(line)
