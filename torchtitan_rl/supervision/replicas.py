"""The generators' processes: started, watched, and replaced when they die or hang.

Between two awaits nobody else runs, so nothing here needs a lock: what is looked at and what is
done about it are never apart.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from torchtitan_rl.core.errors import ActorBrokenError, describe_error
from torchtitan_rl.core.waiting import Interrupted, Result, interruptible, together
from torchtitan_rl.observability.console import console
from torchtitan_rl.observability.timeline import Timeline
from torchtitan_rl.supervision.calls import DeadlineError, WorkerDiedError, call_with_deadline
from torchtitan_rl.supervision.spawn import Spawned
from torchtitan_rl.weight_sync.handle import WeightHandle

START_ATTEMPTS = 3
"""How often a successor is started."""

WATCH_SECONDS = 0.5
"""How often the generators' processes are looked at. Monarch may take half a minute to say that one
it has just sent a message to is gone, and of one that nobody calls it says nothing."""


class GeneratorsDiedError(RuntimeError):
    """No generator is left, and none is on its way."""


class GeneratorDiedError(RuntimeError):
    """One generator died or hung over a call; its successor is on its way."""


@dataclass(slots=True)
class Replica:
    """One generator, on a mesh of its own."""

    number: int
    spawned: Spawned | None = None
    """The one that gets calls; None while it is being started or replaced, and when it is lost."""
    processes: list[Spawned] = field(default_factory=list)
    """All that were started and have not been ended; the newest is last."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the newest has died."""
    load: int = 0
    """Samples it is asked for."""
    since: float = 0.0
    """When it was last begun to be started, by the loop's clock."""
    lost: BaseException | None = None
    """Why it could not be replaced. Tried again when another one dies."""

    def doing(self, now: float) -> str:
        if self.spawned is not None:
            return f"generator {self.number}: sampling {self.load} completions"
        if self.lost is not None:
            return f"generator {self.number}: lost: {describe_error(self.lost)}"
        return f"generator {self.number}: being replaced for {now - self.since:.0f} s"


@dataclass(slots=True)
class Deaths:
    """How many generators have died, for the metrics and for knowing when to give up."""

    total: int = 0
    in_a_row: int = 0
    """Since anything was sampled."""
    since_step: int = 0
    """Not reported yet."""


class Replicas:
    """Generators that outlive their processes. See `Generators` for what they are asked."""

    def __init__(
        self,
        spawn: Callable[[int], Awaitable[Spawned]],
        count: int,
        *,
        deadline_seconds: float,
        most_deaths_in_a_row: int,
        timeline: Timeline,
    ) -> None:
        self._spawn = spawn
        self.replicas = [Replica(number) for number in range(count)]
        self.deaths = Deaths()
        self._deadline = deadline_seconds
        self._timeline = timeline
        self._most_deaths = most_deaths_in_a_row
        self._handle: WeightHandle | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task] = set()
        self._stopping = False
        self._said: set[str] = set()

    async def start(self) -> None:
        """Spawn all of them, side by side."""
        for replica in self.replicas:
            replica.since = asyncio.get_running_loop().time()
        try:
            await together(*(self._start(replica) for replica in self.replicas))
        except BaseException:
            await self.stop()
            raise
        self._in_background(self._watch())

    async def stop(self) -> None:
        """End every process, also of those that are just starting, and start no more."""
        self._stopping = True
        for replica in self.replicas:
            replica.spawned = None
            replica.gone.set()
        self._tell()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(replica) for replica in self.replicas))

    def take_deaths(self) -> int:
        """How many died since the last call."""
        died, self.deaths.since_step = self.deaths.since_step, 0
        return died

    @property
    def hosts(self) -> set[str]:
        """The machines they are on."""
        return {replica.spawned.host for replica in self.replicas if replica.spawned}

    @property
    def _alive(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.spawned is not None]

    async def _some_alive(self) -> None:
        """Wait for a successor if nobody is alive."""
        seconds = START_ATTEMPTS * self._deadline  # a start that hangs is tried again
        try:
            async with asyncio.timeout(seconds):
                while not self._alive:
                    if self._stopping:
                        raise GeneratorsDiedError("the generators were stopped")
                    if all(replica.lost for replica in self.replicas):
                        raise GeneratorsDiedError(
                            f"no generator is left ({self.deaths.in_a_row} died one after the "
                            f"other): {self._state()}. Look into the run's logs folder"
                        ) from self.replicas[0].lost
                    await self._changed.wait()
        except TimeoutError:
            reason = f"waited {seconds:.0f} s for a generator: {self._state()}"
            raise DeadlineError(reason) from None

    def _state(self) -> str:
        now = asyncio.get_running_loop().time()
        return "; ".join(replica.doing(now) for replica in self.replicas)

    # ---- calls --------------------------------------------------------------------------------

    async def _call(
        self, replica: Replica, what: str, call: Callable[[Any], Awaitable[Result]]
    ) -> Result:
        """What its actor answers. If it dies over that, or never answers, it is replaced, and
        GeneratorDiedError says so; any other error is the actor's answer."""
        spawned, gone = replica.spawned, replica.gone
        if spawned is None:
            raise GeneratorDiedError(f"generator {replica.number} is being replaced")
        try:
            return await self._answer(replica, what, call(spawned.actor), gone)
        except Exception as error:
            if not _died(error):
                raise
            self._bury(replica, spawned, error)
            raise GeneratorDiedError(
                f"generator {replica.number}: {describe_error(error)}"
            ) from error

    async def _answer(
        self, replica: Replica, what: str, call: Awaitable[Result], gone: asyncio.Event
    ) -> Result:
        who = f"generator {replica.number}"
        waiting = call_with_deadline(f"{who} to {what}", call, deadline_seconds=self._deadline)
        with self._timeline.span(who, what):
            try:
                return await interruptible(gone, waiting)
            except Interrupted:
                raise WorkerDiedError(f"while waiting for {who} to {what}, it died") from None

    # ---- life and death -----------------------------------------------------------------------

    async def _start(self, replica: Replica) -> None:
        """Spawn a generator; it joins when it serves the current weights."""
        spawned = await self._answer(replica, "start", self._spawned(replica), asyncio.Event())
        served = None
        while served is not (handle := self._handle):  # weights may be published while it pulls
            assert handle is not None
            call = spawned.actor.pull_weights.call_one(handle)
            try:
                await self._answer(replica, "pull weights", call, replica.gone)
                served = handle
            except Exception as error:
                # They may have been overwritten by newer ones just before it read them.
                if _died(error) or handle is self._handle:
                    raise
        # Nothing is awaited between the last look at the handle and this: no pull is missed.
        if not self._stopping:
            replica.spawned = spawned
            self._tell()

    async def _spawned(self, replica: Replica) -> Spawned:
        # Noted here and not by who waits for it, who may be cancelled just as it is ready.
        spawned = await self._spawn(replica.number)
        replica.processes.append(spawned)
        replica.gone = asyncio.Event()
        return spawned

    async def _end(self, replica: Replica) -> None:
        """End all its processes. One that cannot be ended is kept, and tried again next time."""
        for spawned in list(replica.processes):
            try:
                await self._answer(replica, "end", spawned.stop(), asyncio.Event())
                replica.processes = [s for s in replica.processes if s is not spawned]
            except Exception as error:
                self._say(f"generator {replica.number} could not be ended: {describe_error(error)}")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for replica in self.replicas:
                try:
                    self._look(replica)
                except Exception as error:
                    self._say(
                        f"generator {replica.number} cannot be watched: {describe_error(error)}"
                    )

    def _look(self, replica: Replica) -> None:
        for newest in replica.processes[-1:]:
            if not newest.alive:
                replica.gone.set()  # it may be just starting
                self._bury(replica, newest, WorkerDiedError("its process has ended"))

    def _bury(self, replica: Replica, spawned: Spawned, error: BaseException) -> None:
        """Note a death, once, and start the successor."""
        if replica.spawned is not spawned:
            return  # another call has noticed, or all are being stopped
        replica.spawned = None
        replica.gone.set()
        self.deaths.total += 1
        self.deaths.in_a_row += 1
        self.deaths.since_step += 1
        if self.deaths.in_a_row > self._most_deaths:
            self._lose(replica, error)
            self._in_background(self._end(replica))
            return
        for again in [replica, *(r for r in self.replicas if r.lost)]:
            again.lost, again.since = None, asyncio.get_running_loop().time()
            task = self._in_background(self._replace(again))
            task.add_done_callback(partial(self._replaced, again))
        self._say(f"generator {replica.number} died; replacing it", once=False)

    async def _replace(self, replica: Replica) -> None:
        await self._end(replica)  # whatever is left of the dead one
        for left in reversed(range(START_ATTEMPTS)):
            try:
                await self._start(replica)
                return
            except Exception:
                await self._end(replica)
                if not left:
                    raise

    def _replaced(self, replica: Replica, task: asyncio.Task) -> None:
        if self._stopping:
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._lose(replica, error)

    def _lose(self, replica: Replica, error: BaseException) -> None:
        replica.lost = error
        self._tell()  # whoever waits for a generator
        self._say(
            f"generator {replica.number} is not replaced: {describe_error(error)}", once=False
        )

    # ---- odds and ends ------------------------------------------------------------------------

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task:
        """Run it until it ends or all are stopped."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _tell(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _say(self, line: str, *, once: bool = True) -> None:
        if once and line in self._said:
            return
        self._said.add(line)
        with contextlib.suppress(OSError, ValueError):  # a terminal that is gone costs no generator
            console.print(line, markup=False)


def _died(error: BaseException) -> bool:
    """Whether a call failed because its generator died or hangs, and not because of what it was
    asked."""
    if isinstance(error, ActorError):
        return isinstance(error.exception, ActorBrokenError)
    return isinstance(error, WorkerDiedError | SupervisionError | ActorBrokenError | DeadlineError)
