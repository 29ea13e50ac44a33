"""A pool of actors of one kind: started, watched, called with deadlines, and replaced.

One pool serves every kind of actor that a run can replace: generators, graders, the environment,
the reference. `dispatch.py` decides what becomes of the work of an actor that died.

Between two awaits nobody else runs, so nothing here needs a lock: what is looked at and what is
done about it are never apart.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from torchtitan_rl.core.errors import ActorBrokenError, TorchtitanRLError, describe_error
from torchtitan_rl.core.waiting import Result, together
from torchtitan_rl.hosts.link import HostLostError
from torchtitan_rl.observability.console import console
from torchtitan_rl.observability.timeline import Timeline
from torchtitan_rl.supervision.calls import (
    DeadlineError,
    WorkerDiedError,
    call_with_deadline,
)

START_ATTEMPTS = 3
"""How often a successor is started."""

WATCH_SECONDS = 0.5
"""How often the processes are looked at. Monarch may take half a minute to report that a process
it has just sent a message to is gone, and never reports one that nobody calls."""


HOST_IS_BACK = "its host is back"
"""What a replica waits for whose host is lost."""


class ActorsDiedError(TorchtitanRLError, RuntimeError):
    """No actor of a kind is left, and none is on its way: the run cannot go on."""


class ReplicaDiedError(TorchtitanRLError, RuntimeError):
    """An actor died, hung or broke over a call; its successor is on its way."""


class ReplicaLostError(ReplicaDiedError):
    """An actor was lost with its host, for which what was asked of it cannot be to blame."""


class Supervised(Protocol):
    """What a pool needs to know about an actor and its processes; see `spawn.Spawned`."""

    actor: Any

    @property
    def alive(self) -> bool: ...

    @property
    def machines(self) -> frozenset[str]: ...

    @property
    def lost_host(self) -> str: ...

    async def settle(self) -> None: ...

    async def stop(self) -> None: ...


Spawn = Callable[[int], Awaitable[Any]]
"""Starts the actor of the replica with this number; returns a `Supervised`."""
Ready = Callable[[int], Awaitable[None]]
"""Returns when the hosts of the replica with this number are there."""
CallJoining = Callable[[str, Callable[[Any], Awaitable[Any]]], Awaitable[Any]]
"""Calls an actor that has not joined yet: what for, and the call, given the actor."""
OnJoin = Callable[[int, CallJoining], Awaitable[None]]
"""Prepares a new actor of the replica with this number."""


@dataclass(slots=True)
class Replica:
    """One place in a pool: an actor and, when that has died, its successors."""

    number: int
    name: str
    """Name of the lane in the timeline: `generator 0`, `grader`."""
    label: str
    """Name within a sentence: `generator 0`, `the grader`."""
    spawned: Any = None
    """The actor that gets calls; None while it is being started or replaced, and when it is
    lost."""
    processes: list[Any] = field(default_factory=list)
    """Processes that were started and have not been ended; the newest are last."""
    gone: "asyncio.Future[None] | None" = None
    """Done when the newest process has died. One future, so that a call needs no task to wait for
    it; None before the first start."""
    ended_at: float | None = None
    """When the end of the newest process was first seen, by the loop's clock."""
    calls: int = 0
    """Calls under way."""
    load: int = 0
    """Work under way, in the unit that the router balances."""
    since: float = 0.0
    """When the last start of an actor began, by the loop's clock."""
    lost: BaseException | None = None
    """Why the actor could not be replaced. Tried again when another replica dies."""
    held: str = ""
    """Why the next actor may not be started yet; empty: it may."""

    @property
    def moves(self) -> bool:
        """Whether an actor of the replica is being ended or started."""
        return self.spawned is None and self.lost is None and not self.held

    def end_calls(self) -> None:
        """Have all calls under way end: the newest process has died, or is about to be ended."""
        if self.gone is not None and not self.gone.done():
            self.gone.set_result(None)

    def describe(self, now: float) -> str:
        """What the replica is doing, for messages."""
        if self.spawned is not None:
            return f"{self.name}: at work on {self.load} requests"
        if self.lost is not None:
            return f"{self.name}: lost: {describe_error(self.lost)}"
        if self.held:
            return f"{self.name}: to be replaced when {self.held}"
        return f"{self.name}: being replaced for {now - self.since:.0f} s"


@dataclass(slots=True)
class Deaths:
    """How many actors of a pool have died, for the metrics and for knowing when to give up."""

    total: int = 0
    in_a_row: int = 0
    """Deaths since any work was done."""
    since_step: int = 0
    """Deaths that were not reported yet."""


class ActorPool:
    """Replicas of one actor that outlive their processes.

    `on_join` is awaited with every new actor before it gets work, for instance to bring it the
    current weights. It is given a function that calls that actor, with a deadline and watched.

    Example:
        pool = ActorPool("grader", lambda number: spawn_grader(config, task))
        await pool.start()
        replica = await pool.wait_for_replica()
        await pool.call(replica, "grade", lambda actor: actor.rewards.call_one(groups))
        await pool.stop()
    """

    def __init__(
        self,
        kind: str,
        spawn: Spawn,
        count: int = 1,
        *,
        deadline_seconds: float = 1800.0,
        most_deaths_in_a_row: int = 5,
        exit_report_seconds: float = 0.0,
        numbered: bool = False,
        ready: Ready | None = None,
        host_seconds: float = 600.0,
        on_join: OnJoin | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.kind = kind
        if numbered or count > 1:
            names = [f"{kind} {number}" for number in range(count)]
            self.replicas = [Replica(i, name, name) for i, name in enumerate(names)]
        else:
            self.replicas = [Replica(0, kind, f"the {kind}")]
        self.deaths = Deaths()
        self._spawn, self._ready, self._on_join = spawn, ready, on_join
        self._deadline, self._host_seconds = deadline_seconds, host_seconds
        self._most_deaths = most_deaths_in_a_row
        self._exit_report_seconds = exit_report_seconds
        """How long Monarch gets to report how a process ended, while a call waits for it."""
        self._timeline = timeline or Timeline()
        self._changed = asyncio.Event()
        self._starts_held = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._printed: set[str] = set()

    async def start(self) -> None:
        """Spawn all replicas, side by side."""
        for replica in self.replicas:
            replica.since = asyncio.get_running_loop().time()
        try:
            await together(*(self._try_to_start(r, first=True) for r in self.replicas))
        except BaseException:
            await self.stop()
            raise
        self.in_background(self._watch())

    async def stop(self) -> None:
        """End every process, also of replicas that are just starting, and start no more."""
        self._stopping = True
        for replica in self.replicas:
            replica.spawned = None
            replica.end_calls()
        self._notify()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(replica) for replica in self.replicas))

    async def hold_starts(self) -> None:
        """Start no successor until `allow_starts`. Returns when none is being started, and when
        nothing is left of those that have died."""
        self._starts_held = True
        while any(replica.moves for replica in self.replicas):  # each move has a deadline
            await self._changed.wait()

    def allow_starts(self) -> None:
        """Start successors again, also those that were held."""
        self._starts_held = False
        self._notify()

    def take_deaths(self) -> int:
        """How many actors died since the last call of this method."""
        died, self.deaths.since_step = self.deaths.since_step, 0
        return died

    @property
    def machines(self) -> set[str]:
        """The machines that the replicas are on; processes of one machine share memory."""
        return {machine for replica in self.alive for machine in replica.spawned.machines}

    @property
    def alive(self) -> list[Replica]:
        """The replicas that can be called."""
        return [replica for replica in self.replicas if replica.spawned is not None]

    async def wait_for_replica(self) -> None:
        """Return as soon as any replica can be called."""
        seconds = START_ATTEMPTS * self._deadline  # a start that hangs is tried again
        try:
            async with asyncio.timeout(seconds):
                while not self.alive:
                    if self._stopping:
                        raise ActorsDiedError(f"the {self.kind}s were stopped")
                    if all(replica.lost for replica in self.replicas):
                        raise ActorsDiedError(
                            f"no {self.kind} is left ({self.deaths.in_a_row} died one after the "
                            f"other): {self.describe()}. Look into the run's logs folder"
                        ) from self.replicas[0].lost
                    await self._wait_for_change()
        except TimeoutError:
            reason = f"waited {seconds:.0f} s for a {self.kind}: {self.describe()}"
            raise DeadlineError(reason) from None

    async def _wait_for_change(self) -> None:
        """Wait until something has changed; not for ever, if only hosts can bring it about."""
        if any(replica.held != HOST_IS_BACK for replica in self.replicas):
            await self._changed.wait()
            return
        try:
            await asyncio.wait_for(self._changed.wait(), self._host_seconds)
        except TimeoutError:
            raise HostLostError(
                f"no {self.kind} is left, and none of their hosts has come back within "
                f"{self._host_seconds:.0f} s (cluster.wait_seconds)"
            ) from None

    def describe(self) -> str:
        """What every replica is doing, for messages."""
        now = asyncio.get_running_loop().time()
        return "; ".join(replica.describe(now) for replica in self.replicas)

    def look(self, replica: Replica) -> Any:
        """The replica's actor and its processes, if none of these has ended; None while it is being
        replaced. A process that has just ended would not answer a call."""
        try:
            self._look(replica)
        except Exception as error:
            self._print(f"{replica.label} cannot be watched: {describe_error(error)}")
        return replica.spawned

    async def call(
        self,
        replica: Replica,
        what: str,
        call: Callable[[Any], Awaitable[Result]],
        *,
        step: int | None = None,
    ) -> Result:
        """What the replica's actor returns. If it dies over the call, breaks or never returns, it
        is replaced, and ReplicaDiedError says so; any other error is the actor's own."""
        spawned = replica.spawned
        if spawned is None:
            raise ReplicaDiedError(f"{replica.label} is being replaced")
        try:
            return await self._wait(
                replica, what, call(spawned.actor), gone=replica.gone, step=step
            )
        except Exception as error:
            await spawned.settle()
            lost = spawned.lost_host
            if not lost and not is_death(error):
                raise
            self._discard(replica, spawned, error)
            if lost:
                raise ReplicaLostError(f"{replica.name} was lost with {lost}") from error
            raise ReplicaDiedError(f"{replica.name}: {describe_error(error)}") from error

    def in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` until it ends or the pool is stopped."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _wait(
        self,
        replica: Replica,
        what: str,
        call: Awaitable[Result],
        *,
        gone: "asyncio.Future[None] | None" = None,
        step: int | None = None,
    ) -> Result:
        details = {} if step is None else {"step": step}
        replica.calls += 1
        try:
            with self._timeline.span(replica.name, what, **details):
                return await call_with_deadline(
                    f"{replica.label} to {what}", call, deadline_seconds=self._deadline, gone=gone
                )
        finally:
            replica.calls -= 1

    # ---- starting, ending, replacing -----------------------------------------------------------

    async def _start(self, replica: Replica) -> None:
        """Spawn an actor for the replica; it gets calls when `on_join` is done with it."""
        await self._wait_to_start(replica)
        spawned = await self._wait(replica, "start", self._spawned(replica))
        if self._on_join is not None:
            await self._on_join(replica.number, partial(self._call_joining, replica, spawned))
        # Nothing is awaited between the end of `on_join` and this: what that looked at last, such
        # as which weights are the newest, is still so.
        if not self._stopping:
            replica.spawned = spawned
            self._notify()

    async def _wait_to_start(self, replica: Replica) -> None:
        """Return when the replica's hosts are there and successors may be started."""
        if self._ready is not None:
            replica.held = HOST_IS_BACK
            self._notify()
            await self._ready(replica.number)
        if self._starts_held:
            replica.held = "starts are allowed again"
            self._notify()
            while self._starts_held:
                await self._changed.wait()
        replica.held = ""

    async def _call_joining(
        self, replica: Replica, spawned: Any, what: str, call: Callable[[Any], Awaitable[Any]]
    ) -> Any:
        return await self._wait(replica, what, call(spawned.actor), gone=replica.gone)

    async def _spawned(self, replica: Replica) -> Any:
        # Noted here and not by who waits for it, who may be cancelled just as it is ready.
        spawned = await self._spawn(replica.number)
        replica.processes.append(spawned)
        replica.gone, replica.ended_at = asyncio.get_running_loop().create_future(), None
        return spawned

    async def _end(self, replica: Replica) -> None:
        """End all processes of a replica. One that cannot be ended is tried again next time."""
        for spawned in list(replica.processes):
            try:
                await self._wait(replica, "end", spawned.stop())
                replica.processes = [s for s in replica.processes if s is not spawned]
            except Exception as error:
                self._print(f"{replica.label} could not be ended: {describe_error(error)}")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for replica in self.replicas:
                self.look(replica)

    def _look(self, replica: Replica) -> None:
        if not replica.processes or replica.processes[-1].alive:
            return
        now = asyncio.get_running_loop().time()
        replica.ended_at = now if replica.ended_at is None else replica.ended_at
        if replica.calls and now < replica.ended_at + self._exit_report_seconds:
            return  # the error of a call may say more about how it ended
        replica.end_calls()  # it may be just starting
        self._discard(replica, replica.processes[-1], WorkerDiedError("its process has ended"))

    def _discard(self, replica: Replica, spawned: Any, error: BaseException) -> None:
        """Note a death, once, and start the successor."""
        if replica.spawned is not spawned:
            return  # another call has noticed, or all are being stopped
        replica.spawned = None
        replica.end_calls()
        self.deaths.total += 1
        self.deaths.in_a_row += not spawned.lost_host  # a host takes many along at once
        self.deaths.since_step += 1
        if self.deaths.in_a_row > self._most_deaths:
            self.in_background(self._retire(replica, error))
            return
        for again in [replica, *(r for r in self.replicas if r.lost)]:
            again.lost, again.since = None, asyncio.get_running_loop().time()
            task = self.in_background(self._replace(again))
            task.add_done_callback(partial(self._replaced, again))
        if lost := spawned.lost_host:
            line = f"{replica.label} was lost with {lost}; it starts again when the host is back"
        else:
            line = f"{replica.label} died; replacing it"
        self._print(line, once=False)

    async def _replace(self, replica: Replica) -> None:
        await self._end(replica)  # whatever is left of the dead one
        await self._try_to_start(replica)

    async def _try_to_start(self, replica: Replica, *, first: bool = False) -> None:
        """Start an actor for the replica, again if that fails. At the `first` start in a run, what
        the actor itself says is not a matter of chance: then only if it died."""
        failed = 0
        while True:
            try:
                await self._start(replica)
                return
            except Exception as error:
                lost = await _was_lost(replica, error)
                await self._end(replica)
                # A host that was lost meanwhile is waited for, however often.
                failed += not lost
                died = isinstance(error, WorkerDiedError)
                if failed == START_ATTEMPTS or (first and not lost and not died):
                    raise
                if first:
                    self._print(f"{describe_error(error)}; starting it again", once=False)

    async def _retire(self, replica: Replica, error: BaseException) -> None:
        """Give a replica up. It moves until nothing is left of it: `hold_starts` waits for that."""
        await self._end(replica)
        self._lose(replica, error)

    def _replaced(self, replica: Replica, task: asyncio.Task[None]) -> None:
        if self._stopping:
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._lose(replica, error)

    def _lose(self, replica: Replica, error: BaseException) -> None:
        replica.lost = error
        self._notify()
        self._print(f"{replica.label} is not replaced: {describe_error(error)}", once=False)

    def _notify(self) -> None:
        """Wake whoever waits for a replica."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _print(self, line: str, *, once: bool = True) -> None:
        if once and line in self._printed:
            return
        self._printed.add(line)
        with contextlib.suppress(OSError, ValueError):  # a terminal that is gone costs no actor
            console.print(line, markup=False)


async def _was_lost(replica: Replica, error: Exception) -> bool:
    """Whether an actor could not be started because a host was lost."""
    for spawned in replica.processes:
        await spawned.settle()
    gone = any(spawned.lost_host for spawned in replica.processes)
    return gone or isinstance(error, HostLostError)


def is_death(error: BaseException) -> bool:
    """Whether a call failed because its actor died, hangs or is broken, and not because of what was
    asked of it."""
    if isinstance(error, ActorError):
        return isinstance(error.exception, ActorBrokenError)
    return isinstance(error, WorkerDiedError | SupervisionError | ActorBrokenError | DeadlineError)
