"""The grader of a run, replaced when its process dies: a reward function may take it along.

A call that dies is tried again, one group at a time and with nothing beside it, so that the group
whose reward kills is found, and only that one fails.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from torchtitan_rl.actors.grader import RewardError, Ungraded
from torchtitan_rl.core.waiting import Interrupted, interruptible
from torchtitan_rl.observability.console import console
from torchtitan_rl.observability.timeline import Timeline
from torchtitan_rl.supervision.calls import WorkerDiedError, call_with_deadline
from torchtitan_rl.supervision.spawn import Spawned
from torchtitan_rl.tasks.task import Reward

Rewards = list[Reward] | RewardError

WATCH_SECONDS = 0.5
"""How often the process is looked at: Monarch may take half a minute to say that it is gone."""
LAST_WORDS_SECONDS = 3.0
"""How long Monarch gets to say how a process ended, once that is gone."""


class GradersDiedError(RuntimeError):
    """Group after group killed its grader, and nothing was graded in between."""


@dataclass(slots=True)
class _Process:
    """One grader, until it dies."""

    spawned: Spawned
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    watch: asyncio.Task | None = None


class Graders:
    """One grader at a time, and as many one after the other as it takes.

    Example:
        graders = Graders(lambda: spawn_grader(config, task))
        await graders.start()
        [rewards] = await graders.rewards([Ungraded(completions, 24, "sums/train/0")])
        await graders.stop()
    """

    def __init__(
        self,
        spawn: Callable[[], Awaitable[Spawned]],
        *,
        deadline_seconds: float = 1800.0,
        most_guilty_in_a_row: int = 5,
        timeline: Timeline | None = None,
    ) -> None:
        self._spawn, self._deadline = spawn, deadline_seconds
        self._most_guilty = most_guilty_in_a_row
        self._timeline = timeline or Timeline()
        self._processes: list[_Process] = []
        """Those not ended yet; the last one grades."""
        self._starting = asyncio.Lock()
        self._calls = self._suspects = 0
        """Calls under way, and calls that died and are tried again."""
        self._changed = asyncio.Event()
        self._guilty_in_a_row = 0
        """Groups that killed a grader by themselves, since one was graded."""
        self._broken = ""
        """Why nothing is graded any more."""
        self._died = 0

    async def start(self) -> None:
        await self._alive()

    async def stop(self) -> None:
        """End every process."""
        for process in list(self._processes):
            await self._end(process)

    def take_deaths(self) -> int:
        """How many died since the last call."""
        died, self._died = self._died, 0
        return died

    async def rewards(self, groups: list[Ungraded], *, step: int | None = None) -> list[Rewards]:
        """The rewards of each group, or why it has none. Calls run side by side, until one dies."""
        try:
            async with self._turn(alone=False):
                return await self._ask(groups, step)
        except WorkerDiedError:
            self._suspects += 1
        try:
            return [await self._alone(group, step) for group in groups]
        finally:
            self._suspects -= 1
            self._tell()

    async def _alone(self, group: Ungraded, step: int | None) -> Rewards:
        """Nothing is beside it: if the grader dies now, it is this group's doing."""
        try:
            async with self._turn(alone=True):
                return (await self._ask([group], step))[0]
        except WorkerDiedError as error:
            how = _last_words(error)
            # Not each death: a group that kills is met twice, and may take others along at first.
            self._guilty_in_a_row += 1
            if self._guilty_in_a_row > self._most_guilty:
                self._broken = (
                    f"graders died over {self._guilty_in_a_row} groups one after the other, with "
                    f"nothing graded in between; the last was group {group.group_id}: its process "
                    f"{how}"
                )
                raise GradersDiedError(self._broken) from error
            whose = f"reward function of task {group.task!r}, group {group.group_id}"
            return RewardError(f"{whose} ended the grader's process, which {how}")

    @contextlib.asynccontextmanager
    async def _turn(self, *, alone: bool) -> AsyncIterator[None]:
        """While a call is under way. One that must be alone waits for all others, and these wait
        until no call is left that died."""

        def free() -> bool:
            return not self._calls if alone else not self._suspects

        while not free():
            await self._changed.wait()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._tell()

    def _tell(self) -> None:
        """Wake whoever waits for a turn."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _ask(self, groups: list[Ungraded], step: int | None) -> list[Rewards]:
        if self._broken:
            raise GradersDiedError(self._broken)
        process = await self._alive()
        call = process.spawned.actor.rewards.call_one(groups)
        waiting = call_with_deadline("the grader to grade", call, deadline_seconds=self._deadline)
        with self._timeline.span("grader", "grade", step=step):
            try:
                given = await interruptible(process.gone, waiting)
            except Interrupted:
                self._bury(process)
                raise WorkerDiedError("its process has ended") from None
            except WorkerDiedError:
                self._bury(process)
                raise
        self._guilty_in_a_row = 0
        return given

    # ---- life and death -----------------------------------------------------------------------

    async def _alive(self) -> _Process:
        """The grader, or its successor if it has died."""
        async with self._starting:
            for dead in [p for p in self._processes if p.gone.is_set() or not p.spawned.alive]:
                self._bury(dead)
                await self._end(dead)
            if not self._processes:
                starting = self._started()
                try:
                    await call_with_deadline(
                        "the grader to start", starting, deadline_seconds=self._deadline
                    )
                except WorkerDiedError as error:  # which is no group's doing
                    raise GradersDiedError(str(error)) from error
            return self._processes[-1]

    async def _started(self) -> None:
        # Noted here and not by who waits for it, who may be cancelled just as it is ready.
        process = _Process(await self._spawn())
        process.watch = asyncio.create_task(self._watch(process))
        self._processes.append(process)

    async def _watch(self, process: _Process) -> None:
        while process.spawned.alive:
            await asyncio.sleep(WATCH_SECONDS)
        await asyncio.sleep(LAST_WORDS_SECONDS)
        process.gone.set()

    def _bury(self, process: _Process) -> None:
        """Count a death, once."""
        if process.watch is None:
            return
        process.watch.cancel()
        process.watch = None
        process.gone.set()
        self._died += 1
        console.print("the grader died; replacing it", markup=False)

    async def _end(self, process: _Process) -> None:
        if process.watch is not None:
            process.watch.cancel()
            process.watch = None
        await process.spawned.stop()
        if process in self._processes:
            self._processes.remove(process)


def _last_words(error: WorkerDiedError) -> str:
    """How a process ended, as Monarch says it in the last line of an error.

    Example:
        "exited with non-zero code 3", "failed: Killed(sig=9)"; if it says nothing: "has ended"
    """
    said = str(error).rstrip().splitlines()[-1].strip()
    found = said.partition("process this actor was running on ")[2]
    return found or "has ended"
