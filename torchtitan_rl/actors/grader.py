"""Grader: the task's reward function, called with the samples of one prompt at a time."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

from monarch.actor import Actor, concurrent_endpoint

from torchtitan_rl.actors.interfaces import GroupRewards, UngradedGroup
from torchtitan_rl.config.grader import GraderConfig
from torchtitan_rl.core.errors import describe_error
from torchtitan_rl.core.types import Completion, Rollout, ScoredCompletion
from torchtitan_rl.tasks.rewards import RewardError, check_rewards
from torchtitan_rl.tasks.task import Reward, Task

CONCURRENT_REWARDS = 4
"""Reward functions that run at a time."""


class Grader(Actor):
    """Scores completions in a process of its own, so that a reward function cannot hurt the rest.

    Example:
        grader = await spawn_grader(Grader.Config(), SumDigits.Config())
        scored = await grader.actor.score.call_one(completions, expected_answer=24)
    """

    Config: TypeAlias = GraderConfig

    def __init__(self, config: GraderConfig, *, task: Task.Config, seed: int = 0) -> None:
        self.config = config
        self._task_config, self._seed = task, seed

    @concurrent_endpoint
    async def setup(self) -> None:
        """Build the task. Apart from `__init__`, so that a failure comes back as an error."""
        self.task: Task = self._task_config.build(seed=self._seed)
        self.tasks = self.task.members()
        # The clock of one must not run while it waits for its turn.
        self._turns = asyncio.Semaphore(CONCURRENT_REWARDS)

    @concurrent_endpoint
    async def score(
        self,
        completions: list[Completion] | list[Rollout],
        expected_answer: Any,
        *,
        group_id: str = "?",
        task: str | None = None,
    ) -> list[ScoredCompletion]:
        """The samples of one group, each with its reward, in order. In a mixture, name its task."""
        group = UngradedGroup(completions, expected_answer, group_id, task)
        (rewards,) = await self._one_by_one([group])
        if isinstance(rewards, RewardError):
            raise rewards
        return pair(completions, rewards)

    @concurrent_endpoint
    async def rewards(self, groups: list[UngradedGroup]) -> list[GroupRewards]:
        """The rewards of many groups, or why a group has none. Without the samples: the caller
        has these, and they are most of what a reply would weigh."""
        shares = [groups[first::CONCURRENT_REWARDS] for first in range(CONCURRENT_REWARDS)]
        graded = await asyncio.gather(*map(self._one_by_one, shares))
        return [
            graded[index % CONCURRENT_REWARDS][index // CONCURRENT_REWARDS]
            for index in range(len(groups))
        ]

    async def _one_by_one(self, groups: Sequence[UngradedGroup]) -> list[GroupRewards]:
        """Grade groups on one thread, because a thread for each costs more than most rewards do;
        groups after one that takes too long get another thread."""
        results: list[GroupRewards] = []
        while len(results) < len(groups):
            results += await self._until_one_is_late(groups[len(results) :])
        return results

    async def _until_one_is_late(self, groups: Sequence[UngradedGroup]) -> list[GroupRewards]:
        thread, seconds = _Thread(groups, self._rewards), self.config.timeout_seconds
        async with self._turns:
            ended, left = thread.start(), seconds
            while left > 0 and not ended.done():
                await asyncio.wait({ended}, timeout=left)
                left = thread.seconds_left(seconds)
        if len(thread.results) == len(groups):
            return thread.results
        late = self._name(groups[len(thread.results)])
        return [*thread.results, RewardError(f"{late}: no answer in {seconds} s")]

    def _rewards(self, group: UngradedGroup) -> GroupRewards:
        task, rollouts = self._task_of(group), cast(list[Rollout], group.completions)
        try:
            rewards = task.reward(rollouts, group.expected_answer)
            return check_rewards(rewards, len(rollouts), self._name(group), task.reward)
        except RewardError as error:
            return error
        except BaseException as error:  # SystemExit too: whatever it is, it is the group's
            said = describe_error(error, type(task).__module__)
            return RewardError(f"{self._name(group)} raised {said}")

    def _name(self, group: UngradedGroup) -> str:
        return f"reward function of task {self._task_of(group).name!r}, group {group.group_id}"

    def _task_of(self, group: UngradedGroup) -> Task:
        return self.tasks[group.task] if group.task is not None else self.task


class _Thread:
    """Groups that a thread grades, one after the other.

    A thread of its own, not one of a pool: a reward function that never returns keeps it for ever.
    """

    def __init__(
        self,
        groups: Sequence[UngradedGroup],
        grade: Callable[[UngradedGroup], GroupRewards],
    ) -> None:
        self.results: list[GroupRewards] = []
        self._groups, self._grade = groups, grade
        self._began = time.monotonic()
        """When the thread began the group it is at, by the monotonic clock."""
        self._given_up = False
        self._lock = threading.Lock()

    def start(self) -> "asyncio.Future[None]":
        """Done when the thread is."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def run() -> None:
            self._run()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(ended.set_result, None)

        threading.Thread(target=run, daemon=True, name="rewards").start()
        return ended

    def seconds_left(self, seconds: float) -> float:
        """What is left of the time that the thread's current group may take. When none is left, the
        rewards of that group and of those after it are not taken any more."""
        with self._lock:
            left = self._began + seconds - time.monotonic()
            self._given_up = left <= 0 and len(self.results) < len(self._groups)
            return left

    def _run(self) -> None:
        for group in self._groups:
            result = self._grade(group)
            with self._lock:
                if self._given_up:
                    return
                self.results.append(result)
                self._began = time.monotonic()


def pair(
    completions: Sequence[Completion | Rollout], rewards: Sequence[Reward]
) -> list[ScoredCompletion]:
    """The samples of a group, each with its reward."""
    return [
        ScoredCompletion(completion, reward.value, reward.correct, reward.parts)
        for completion, reward in zip(completions, rewards, strict=True)
    ]
