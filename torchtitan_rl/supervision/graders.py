"""The grader of a run, replaced when its process dies: a reward function may end that.

A call that dies is tried again, one group at a time and with nothing beside it, so that the group
whose reward kills is found, and only that one fails.
"""

from collections.abc import Sequence
from typing import Any

from torchtitan_rl.actors.interfaces import GroupRewards, RewardError, UngradedGroup
from torchtitan_rl.observability.timeline import Timeline
from torchtitan_rl.supervision.calls import DeadlineError
from torchtitan_rl.supervision.dispatch import ISOLATE, Dispatcher, Work
from torchtitan_rl.supervision.pool import (
    ActorPool,
    ActorsDiedError,
    Ready,
    ReplicaDiedError,
    Spawn,
)

EXIT_REPORT_SECONDS = 3.0
"""How long Monarch gets to report how a grader's process ended."""


class Graders:
    """The grader of a run; one that dies is replaced by the next.

    Example:
        graders = Graders(lambda number: spawn_grader(config, task))
        await graders.start()
        [rewards] = await graders.rewards([UngradedGroup(completions, 24, "sums/train/0")])
        await graders.stop()
    """

    def __init__(
        self,
        spawn: Spawn,
        *,
        deadline_seconds: float = 1800.0,
        most_deadly_in_a_row: int = 5,
        exit_report_seconds: float = EXIT_REPORT_SECONDS,
        ready: Ready | None = None,
        host_seconds: float = 600.0,
        timeline: Timeline | None = None,
    ) -> None:
        self.pool = ActorPool(
            "grader",
            spawn,
            deadline_seconds=deadline_seconds,
            # A group that kills is met twice: beside others, and alone.
            most_deaths_in_a_row=2 * (most_deadly_in_a_row + 1),
            exit_report_seconds=exit_report_seconds,
            ready=ready,
            host_seconds=host_seconds,
            timeline=timeline,
        )
        self._dispatcher = Dispatcher[UngradedGroup, GroupRewards](
            self.pool, ISOLATE, what="grade", call=self._grade, deadly_error=self._deadly_error
        )
        self._most_deadly = most_deadly_in_a_row
        self._deadly_in_a_row = 0
        """Groups that killed a grader by themselves, since any group was graded."""
        self._broken = ""
        """Why nothing is graded any more."""

    async def start(self) -> None:
        """Spawn the grader."""
        await self.pool.start()

    async def stop(self) -> None:
        """End every process of the grader."""
        await self.pool.stop()

    async def rewards(
        self, groups: Sequence[UngradedGroup], *, step: int | None = None
    ) -> list[GroupRewards]:
        """The rewards of each group, or why it has none. Calls run side by side, until one dies."""
        works = [Work[UngradedGroup, GroupRewards](group) for group in groups]
        await self._dispatcher.run(works, step=step)
        return [_rewards(work) for work in works]

    async def _grade(self, actor: Any, groups: list[UngradedGroup]) -> list[GroupRewards]:
        if self._broken:
            raise ActorsDiedError(self._broken)
        rewards = await actor.rewards.call_one(groups)
        self._deadly_in_a_row = 0
        return rewards

    def _deadly_error(
        self, work: Work[UngradedGroup, GroupRewards], error: ReplicaDiedError
    ) -> RewardError:
        """The error of a group over which a grader died with nothing beside it."""
        group, how = work.payload, how_it_ended(error)
        # Groups are counted and not deaths: at first a group that kills takes others along.
        self._deadly_in_a_row += 1
        if self._deadly_in_a_row > self._most_deadly:
            self._broken = (
                f"graders died over {self._deadly_in_a_row} groups one after the other, with "
                f"nothing graded in between; the last was group {group.group_id}: its process "
                f"{how}"
            )
            raise ActorsDiedError(self._broken) from error
        whose = f"reward function of task {group.task!r}, group {group.group_id}"
        return RewardError(f"{whose} ended the grader's process, which {how}")


def _rewards(work: Work[UngradedGroup, GroupRewards]) -> GroupRewards:
    if isinstance(work.error, RewardError):
        return work.error
    return work.outcome


def how_it_ended(error: BaseException) -> str:
    """How a process ended, as the error of a call says it.

    Example:
        "exited with non-zero code 3", "was killed by signal 9 (SIGKILL)", or else "has ended"
    """
    if isinstance(error.__cause__, DeadlineError):
        return "hung"
    return str(error).partition("its process ")[2] or "has ended"
