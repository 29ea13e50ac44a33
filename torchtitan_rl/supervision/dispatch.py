"""Work for a pool of actors: who does it, and what becomes of it when an actor dies over it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, TypeVar, cast

from torchtitan_rl.core.waiting import together
from torchtitan_rl.supervision.pool import ActorPool, Replica, ReplicaDiedError, ReplicaLostError

Payload = TypeVar("Payload")
Outcome = TypeVar("Outcome")


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """What becomes of work over which an actor died."""

    attempts: int
    """Actors that may die over the same work; then it fails, and only it."""
    isolated: bool = False
    """Whether the last attempt is made in isolation, so that work that kills does not fail what was
    only beside it."""
    exclusive: bool = False
    """Whether nothing else is under way in the pool during that attempt, so that a death proves
    who caused it. Else only other isolated work waits."""

    @property
    def shared_attempts(self) -> int:
        """Attempts that are made beside other work."""
        return self.attempts - self.isolated


RETRY = FailurePolicy(attempts=3)
"""Repeat the call on the successor: for stateless calls that cannot be divided."""
RETRY_ELSEWHERE = FailurePolicy(attempts=3, isolated=True)
"""Repeat the work on any other actor, at once; the third and last attempt is made apart from other
work over which two actors died."""
ISOLATE = FailurePolicy(attempts=2, isolated=True, exclusive=True)
"""Run every part of a call that died once more, with nothing beside it: a death then proves which
part kills."""
RETRY_THEN_ISOLATE = FailurePolicy(attempts=3, isolated=True, exclusive=True)
"""Repeat the whole call once, for most deaths are accidents; then do as ISOLATE does."""


@dataclass(slots=True)
class Work(Generic[Payload, Outcome]):
    """A part of a call that is done or fails as a whole."""

    payload: Payload
    key: str = ""
    """Work with the same key goes to the same replica while its router remembers it."""
    load: int = 1
    """How busy it keeps a replica."""
    deaths: int = 0
    """Actors that died over it."""
    alone: bool = False
    """Whether it runs in a call of its own: one that it shared has failed."""
    done: bool = False
    """Whether it has succeeded or failed; else it is assigned again."""
    error: Exception | None = None
    """Why it failed, if it did."""
    _outcome: Outcome | None = None

    def succeed(self, outcome: Outcome) -> None:
        self.done, self._outcome = True, outcome

    def fail(self, error: Exception) -> None:
        self.done, self.error = True, error

    @property
    def outcome(self) -> Outcome:
        """The outcome of work that is done; the error of work that failed is raised."""
        assert self.done, "the work is not done"
        if self.error is not None:
            raise self.error
        return cast(Outcome, self._outcome)


@dataclass(slots=True)
class Assignment(Generic[Payload, Outcome]):
    """The work that one replica does in one call."""

    replica: Replica
    works: list[Work[Payload, Outcome]] = field(default_factory=list)
    load: int = 0

    def add(self, work: Work[Payload, Outcome]) -> None:
        self.works.append(work)
        self.load += work.load
        self.replica.load += work.load

    @property
    def payloads(self) -> list[Payload]:
        return [work.payload for work in self.works]

    def release(self) -> None:
        """Note that the replica is done with it. Can be called twice."""
        self.replica.load -= self.load
        self.load = 0


_load = attrgetter("load")


class Router:
    """Chooses the least loaded replica; with `sticky`, the one that has had the same key."""

    def __init__(self, *, sticky: bool = False) -> None:
        self._sticky = sticky
        self.homes: dict[str, Replica] = {}

    def choose(self, key: str, alive: Sequence[Replica]) -> Replica:
        """The replica for work with this key, among those that can be called."""
        replica = self.homes.get(key)
        if replica is None or replica.spawned is None:
            replica = min(alive, key=_load)  # of several, the first
            if self._sticky:
                self.homes[key] = replica
        return replica

    def forget(self) -> None:
        """Choose anew for every key."""
        self.homes.clear()


class Dispatcher(Generic[Payload, Outcome]):
    """Has work done by a pool, under a failure policy.

    `call` is given an actor and the payloads of one call, and returns an outcome for each; an error
    that it raises is an answer of the actor, and makes every part of the call run by itself.
    `deadly_error` makes the error of work over which too many actors have died. `abandon` tells an
    actor that nobody waits for some payloads any more.

    Example:
        grade = Dispatcher(pool, ISOLATE, what="grade", call=call, deadly_error=deadly_error)
        works = [Work(group) for group in groups]
        await grade.run(works)
    """

    def __init__(
        self,
        pool: ActorPool,
        policy: FailurePolicy,
        *,
        what: str,
        call: Callable[[Any, list[Payload]], Awaitable[list[Outcome]]],
        deadly_error: Callable[[Work[Payload, Outcome], ReplicaDiedError], Exception],
        abandon: Callable[[Any, list[Payload]], Awaitable[Any]] | None = None,
        router: Router | None = None,
    ) -> None:
        self.pool, self.policy, self.router = pool, policy, router or Router()
        self._what, self._call, self._abandon = what, call, abandon
        self._deadly_error = deadly_error
        self._calls = self._isolating = 0
        """Attempts under way, and `run`s whose work that is left must be isolated."""
        self._changed = asyncio.Event()
        self._isolated = asyncio.Lock()

    async def run(
        self, works: Sequence[Work[Payload, Outcome]], *, step: int | None = None
    ) -> None:
        """Return when each work is done."""
        isolating = False
        try:
            while left := [work for work in works if not work.done]:
                shared = [work for work in left if work.deaths < self.policy.shared_attempts]
                if not shared and not isolating:
                    isolating = True
                    self._isolating += 1
                async with self._turn(isolated=not shared):
                    await self._attempt(shared or left[:1], step)
        finally:
            if isolating:
                self._isolating -= 1
                self._notify()

    @contextlib.asynccontextmanager
    async def _turn(self, *, isolated: bool) -> AsyncIterator[None]:
        """Wait until an attempt may be made, and hold its place. An isolated one waits for other
        isolated ones. If the policy is exclusive, it waits for all others, and those wait until no
        work is left that must be isolated."""
        if not self.policy.exclusive:
            async with self._isolated if isolated else contextlib.nullcontext():
                yield
            return
        while self._calls if isolated else self._isolating:
            await self._changed.wait()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._notify()

    def _notify(self) -> None:
        """Wake whoever waits for a turn."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _attempt(self, works: list[Work[Payload, Outcome]], step: int | None) -> None:
        await self.pool.wait_for_replica()
        assignments = self._assign(works)
        try:
            await together(*(self._perform(assignment, step) for assignment in assignments))
        finally:
            for assignment in assignments:  # also those that were cancelled before they began
                assignment.release()

    def _assign(self, works: list[Work[Payload, Outcome]]) -> list[Assignment[Payload, Outcome]]:
        assignments: dict[tuple[int, int | None], Assignment[Payload, Outcome]] = {}
        alive = self.pool.alive
        for index, work in enumerate(works):
            replica = self.router.choose(work.key, alive)
            key = (replica.number, index if work.alone else None)
            assignments.setdefault(key, Assignment(replica)).add(work)
        return list(assignments.values())

    async def _perform(self, assignment: Assignment[Payload, Outcome], step: int | None) -> None:
        """Give the works of an assignment their outcomes, or an error. Those that are not done then
        are assigned again."""
        works, payloads = assignment.works, assignment.payloads
        # Only the replica that is called, and not all: each look asks the kernel.
        spawned = self.pool.look(assignment.replica)
        try:
            if spawned is None:  # died since it was chosen
                return
            outcomes = await self.pool.call(
                assignment.replica,
                self._what,
                lambda actor: self._call(actor, payloads),
                step=step,
            )
            self.pool.deaths.in_a_row = 0
            for work, outcome in zip(works, outcomes, strict=True):
                work.succeed(outcome)
        except asyncio.CancelledError:
            if spawned is assignment.replica.spawned:
                self._cancel(assignment)
            raise
        except ReplicaDiedError as error:
            for work in works:
                work.deaths += not isinstance(error, ReplicaLostError)
                if work.deaths >= self.policy.attempts:
                    failure = self._deadly_error(work, error)
                    failure.__cause__ = error
                    work.fail(failure)
        except Exception as error:
            if len(works) == 1:
                works[0].fail(error)
            for work in works:  # one of them may be the cause: each runs once more, by itself
                work.alone = True
        finally:
            assignment.release()

    def _cancel(self, assignment: Assignment[Payload, Outcome]) -> None:
        """Have an actor drop what nobody waits for any more; until it has, it is no less busy. One
        that does not even return from this hangs, and is replaced."""
        if self._abandon is None:
            return
        abandon, kept = self._abandon, Assignment[Payload, Outcome](assignment.replica)
        for work in assignment.works:
            kept.add(work)

        async def cancel() -> None:
            with contextlib.suppress(Exception):  # nobody waits for this either
                await self.pool.call(
                    kept.replica, "cancel", lambda actor: abandon(actor, kept.payloads)
                )

        self.pool.in_background(cancel()).add_done_callback(lambda _: kept.release())
