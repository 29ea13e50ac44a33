"""Grader: the task's reward function, one prompt group per call."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

from monarch.actor import Actor, ActorError, concurrent_endpoint
from torchtitan.config import Configurable

from torchtitan_rl.tasks.task import Reward, Task
from torchtitan_rl.types import Completion, Rollout, ScoredCompletion

CONCURRENT_REWARDS = 4
"""Fewer than the threads that asyncio keeps on the smallest machine."""


class RewardError(RuntimeError):
    """A reward function failed; the message names the task and the group."""


class Grader(Actor, Configurable):
    """Scores completions in a process of its own, so that a reward function cannot hurt the rest.

    Example:
        grader = await spawn_grader(Grader.Config(), SumDigits.Config())
        scored = await grader.actor.score.call_one(completions, expected_answer=24)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        timeout_seconds: float = 60.0
        """Longest a reward function may take for one group."""

        def __post_init__(self) -> None:
            if self.timeout_seconds <= 0:
                raise ValueError("grader.timeout_seconds must be positive")

    def __init__(self, config: Config, *, task: Task.Config, seed: int = 0) -> None:
        self.config = config
        self._task_config, self._seed = task, seed

    @concurrent_endpoint
    async def setup(self) -> None:
        """Build the task. Apart from `__init__`, so that a failure comes back as an error."""
        self.task: Task = self._task_config.build(seed=self._seed)
        self.tasks = self.task.members()
        # As many reward functions at a time as there are threads for them: the clock of one must
        # not run while it waits for its turn.
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
        chosen = self.tasks[task] if task is not None else self.task
        where = f"reward function of task {chosen.name!r}, group {group_id}"
        async with self._turns:
            # On a thread: a slow reward function must not keep the other groups waiting.
            call = asyncio.create_task(
                asyncio.to_thread(chosen.reward, cast(list[Rollout], completions), expected_answer)
            )
            done, _ = await asyncio.wait({call}, timeout=self.config.timeout_seconds)
        if not done:
            raise RewardError(f"{where}: no answer in {self.config.timeout_seconds} s")
        if error := call.exception():
            raise RewardError(f"{where} raised {type(error).__name__}: {error}") from error
        return check_rewards(completions, call.result(), where)


def is_reward_error(error: BaseException) -> TypeGuard[ActorError]:
    """Whether a grader's answer says that a reward function failed."""
    return isinstance(error, ActorError) and isinstance(error.exception, RewardError)


def check_rewards(
    completions: Sequence[Completion | Rollout], rewards: Any, where: str
) -> list[ScoredCompletion]:
    """Pair completions with what the reward function returned, or say what is wrong with it."""
    try:
        rewards = list(rewards)
    except TypeError:
        raise RewardError(f"{where} returned {rewards!r}; expected a list of rewards") from None
    if len(rewards) != len(completions):
        raise RewardError(
            f"{where} returned {len(rewards)} rewards for {len(completions)} completions"
        )
    scored = []
    for index, (completion, reward) in enumerate(zip(completions, rewards, strict=True)):
        if isinstance(reward, bool | int | float):
            reward = Reward(float(reward), correct=reward >= 1.0)
        numbers = [reward.value, *reward.parts.values()] if isinstance(reward, Reward) else [None]
        if not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers):
            raise RewardError(
                f"{where} returned {reward!r} for completion {index}; expected a finite number"
            )
        scored.append(ScoredCompletion(completion, reward.value, reward.correct, reward.parts))
    return scored
