"""The controller's connection to the worker of a host, kept up and watched on a thread of its own.

The controller may compute for seconds on end; the host must not take it for gone, nor it the host.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import torchtitan_rl
from torchtitan_rl.core.errors import describe_error
from torchtitan_rl.hosts.facts import HostFacts, python_version
from torchtitan_rl.hosts.messages import (
    HANDSHAKE_SECONDS,
    LONGEST,
    ClosedError,
    HostError,
    Messages,
)
from torchtitan_rl.hosts.secret import is_proof, new_number, proof
from torchtitan_rl.hosts.session import START_SECONDS

AGAIN_SECONDS = 1.0
"""How long to wait before a host that cannot be reached is tried again."""
CONNECT_SECONDS = 5.0
WORKERS_SHARE = 0.7
"""Share of the silence after which a host is lost here that its worker is to bear: its processes
are to have ended, or be about to, when their work begins elsewhere."""
END_SECONDS = 10.0
"""How long a worker may take to end a run's processes, when that has ended."""
Result = TypeVar("Result")


class HostLostError(HostError):
    """A host has gone, or is silent; what was under way on it has ended."""


class RefusedError(HostError):
    """A host answers, and does not work for this run; to try again would not help."""


class Session:
    """One uninterrupted connection: what is started in it ends with it."""

    def __init__(self, messages: Messages, facts: HostFacts, monarch: str) -> None:
        self.messages, self.facts, self.monarch = messages, facts, monarch
        self.lost = ""
        """Why it has ended; empty while it has not."""
        self.ends: dict[int, dict[int, str]] = {}
        """How processes have ended, by the number of their actor and by rank."""
        self.answers: dict[int, asyncio.Future[Any]] = {}

    @property
    def own_address(self) -> str:
        """Address of this machine, as the host reaches it."""
        return self.messages.own_address


class LinkThread:
    """The thread that all links of a controller share."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="hosts", daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What `work` returns, which runs on the thread."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def close(self) -> None:
        """End the thread, when all links are closed."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Link:
    """Connection to one worker, made anew whenever it is lost.

    All methods run on the link's thread, but `session`, `error` and `refused` may be read anywhere.
    """

    def __init__(
        self, address: str, port: int, *, secret: str, run: str, owner: str, silence: float
    ) -> None:
        """`owner` is a random text by which a worker knows this controller when it comes again.
        `silence` is how long, in seconds, a host may say nothing."""
        self.address, self.port = address, port
        self._secret, self._run, self._owner, self._silence = secret, run, owner, silence
        self._numbers = itertools.count(1)
        self._keeping: asyncio.Task[None] | None = None
        self._closing = False
        self._on_change: list[Callable[[], None]] = []
        self.session: Session | None = None
        """The connection that there is; None while there is none."""
        self.error = "not connected yet"
        """Why there is none."""
        self.refused = False
        """Whether the worker does not want this controller."""

    def on_change(self, callback: Callable[[], None]) -> None:
        """Have a function called, on the link's thread, when the connection is there or lost."""
        self._on_change.append(callback)

    def start(self) -> None:
        """Connect, now and whenever the connection is lost."""
        self._keeping = asyncio.get_running_loop().create_task(self._keep())

    async def close(self) -> None:
        """Have the worker end what was started, and connect no more."""
        self._closing = True
        if self._keeping is None:
            return
        if self.session is not None:
            self.session.messages.send(call="bye")  # it closes the connection when all has ended
        else:
            self._keeping.cancel()
        await asyncio.wait({self._keeping}, timeout=END_SECONDS)
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)

    async def ask(self, session: Session, call: str, seconds: float, **values: Any) -> Any:
        """What the worker answers in a session; HostLostError if that has ended, or ends before."""
        if session.lost:
            raise HostLostError(session.lost)
        number = next(self._numbers)
        answer = session.answers[number] = asyncio.get_running_loop().create_future()
        session.messages.send(id=number, call=call, **{"with": values})
        try:
            return await asyncio.wait_for(answer, seconds)
        except TimeoutError:
            raise HostError(f"it has not answered {call!r} for {seconds:g} s") from None
        finally:
            session.answers.pop(number, None)

    # ---- keeping the connection -----------------------------------------------------------------

    async def _keep(self) -> None:
        while not self._closing:
            try:
                session = await self._connect()
            except Exception as error:  # whatever listens there, it is tried again
                self.refused = isinstance(error, RefusedError)
                self._note(None, _described(error))
            else:
                self.refused = False
                self._note(session, "")
                why = "the run has ended"
                try:
                    why = await self._listen(session)
                except Exception as error:
                    why = _described(error)
                finally:
                    self._lose(session, "the run has ended" if self._closing else why)
            if not self._closing:
                await asyncio.sleep(AGAIN_SECONDS)

    async def _connect(self) -> Session:
        messages = await Messages.connect(self.address, self.port, CONNECT_SECONDS)
        try:
            hello = await messages.receive(HANDSHAKE_SECONDS)
            own, theirs = new_number(), str(hello["worker"])
            if hello["version"] != torchtitan_rl.__version__:
                raise RefusedError(
                    f"its worker is of torchtitan_rl {hello['version']}, and this is "
                    f"{torchtitan_rl.__version__}: install one version on all hosts"
                )
            messages.send(
                controller=own,
                proof=proof(self._secret, "controller", own, theirs),
                run=self._run,
                owner=self._owner,
                silence=WORKERS_SHARE * self._silence,
            )
            answer = _checked(await messages.receive(HANDSHAKE_SECONDS))
            if not is_proof(answer["proof"], self._secret, "worker", own, theirs):
                raise RefusedError("it does not know this run's secret")
            messages.longest = LONGEST
            # Monarch's server starts meanwhile.
            begun = _checked(await messages.receive(START_SECONDS + HANDSHAKE_SECONDS))
            facts = HostFacts.from_json(begun["facts"])
            if facts.problem:
                raise RefusedError(facts.problem)
            if facts.python != (own_python := python_version()):
                raise RefusedError(f"it has Python {facts.python}, and this is {own_python}")
            return Session(messages, facts, str(begun["monarch"]))
        except BaseException:
            messages.abort()
            raise

    async def _listen(self, session: Session) -> str:
        """Hand out what the worker says until it has gone; returns how that was noticed."""
        pinging = asyncio.create_task(self._ping(session))
        try:
            while True:
                # Each ping is answered, so a host that says nothing is lost.
                message = await session.messages.receive(self._silence)
                if "leaving" in message:
                    return str(message["leaving"])
                if "ended" in message:
                    of_actor = session.ends.setdefault(message["ended"], {})
                    of_actor[message["rank"]] = message["how"]
                elif (answer := session.answers.get(message.get("id", 0))) is not None:
                    if answer.done():
                        continue
                    if "error" in message:
                        answer.set_exception(HostError(message["error"]))
                    else:
                        answer.set_result(message.get("value"))
        except ClosedError as error:
            return str(error)
        finally:
            pinging.cancel()

    async def _ping(self, session: Session) -> None:
        while True:
            session.messages.send(id=0, call="ping")
            await asyncio.sleep(self._silence / 5)

    def _lose(self, session: Session, why: str) -> None:
        session.lost = why
        session.messages.abort()
        for answer in session.answers.values():
            if not answer.done():
                answer.set_exception(HostLostError(why))
        self._note(None, why)

    def _note(self, session: Session | None, error: str) -> None:
        self.session, self.error = session, error
        for callback in self._on_change:
            callback()


def _described(error: Exception) -> str:
    """Why there is no connection, in a few words."""
    if isinstance(error, HostError):
        return str(error)
    return f"what listens there is no worker of torchtitan_rl ({describe_error(error)})"


def _checked(message: dict[str, Any]) -> dict[str, Any]:
    if "busy" in message:  # perhaps by a run that is just ending
        raise ClosedError(str(message["busy"]))
    if "error" in message:
        raise RefusedError(str(message["error"]))
    return message
