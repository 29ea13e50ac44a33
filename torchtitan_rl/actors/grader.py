"""Grader: the task's reward function, one prompt group per call."""

import asyncio
import math
from dataclasses import dataclass
from typing import Any

from monarch.actor import Actor, concurrent_endpoint
from torchtitan.config import Configurable

from torchtitan_rl.tasks.task import Reward, Task
from torchtitan_rl.types import Completion, ScoredCompletion


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

    def __init__(self, config: Config, *, task: Task.Config) -> None:
        self.config = config
        self.task: Task = task.build()

    @concurrent_endpoint
    async def score(
        self, completions: list[Completion], expected_answer: Any, *, group_id: str = "?"
    ) -> list[ScoredCompletion]:
        """The completions of one group, each with its reward, in order."""
        where = f"reward function of task {self.task.name!r}, group {group_id}"
        try:
            # On a thread: a slow reward function must not keep the other groups waiting.
            rewards = await asyncio.wait_for(
                asyncio.to_thread(self.task.reward, completions, expected_answer),
                self.config.timeout_seconds,
            )
        except TimeoutError:
            raise RewardError(f"{where}: no answer in {self.config.timeout_seconds} s") from None
        except Exception as error:
            raise RewardError(f"{where} raised {type(error).__name__}: {error}") from error
        return check_rewards(completions, rewards, where)


def check_rewards(
    completions: list[Completion], rewards: Any, where: str
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
        if not isinstance(reward, Reward) or not math.isfinite(reward.value):
            raise RewardError(f"{where} returned {reward!r} for completion {index}")
        scored.append(ScoredCompletion(completion, reward.value, reward.correct, reward.parts))
    return scored
