"""Tasks a random model earns rewards in. Imports little: every grader of a test imports it."""

import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_rl.core.types import Message, Rollout
from torchtitan_rl.tasks.task import Example, Reward, Task


class LowTokens(Task):
    """Rewards token ids below 100: a random model gets some right, so every step trains."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        name: str = "low_tokens"

    config: Config

    def train_example(self, index: int) -> Example:
        return Example([{"role": "user", "content": f"{self.seed} train {index}"}], None)

    def heldout_examples(self, count: int) -> list[Example]:
        return [
            Example([{"role": "user", "content": f"heldout {index}"}], None)
            for index in range(count)
        ]

    def reward(
        self, completions: Sequence[Rollout], expected_answer: Any
    ) -> Sequence[Reward | float]:
        rewards: list[Reward | float] = [
            sum(i < 100 for i in c.token_ids) / len(c.token_ids) for c in completions
        ]
        match expected_answer:  # how the reward function is to misbehave
            case "raise":
                raise KeyError("no such answer")
            case "short":
                return rewards[:-1]
            case "nan":
                return [float("nan")] * len(rewards)
            case "exit":
                raise SystemExit(3)
            case "hang":
                threading.Event().wait(30)
        return rewards


class Talkative(LowTokens):
    """Answers whatever the model says."""

    @dataclass(kw_only=True, slots=True)
    class Config(LowTokens.Config):
        name: str = "talkative"

    config: Config

    def answer(self, messages: list[Message], state: dict[str, Any]) -> list[Message]:
        return [{"role": "user", "content": "go on"}]


class Deadly(LowTokens):
    """A reward function that takes its process along, for some groups."""

    @dataclass(kw_only=True, slots=True)
    class Config(LowTokens.Config):
        name: str = "deadly"
        every: int = 5
        """Of so many train prompts, one kills."""

    config: Config

    def train_example(self, index: int):
        kills = index % self.config.every == 1 % self.config.every
        return replace(super().train_example(index), expected_answer="exit" if kills else None)

    def reward(self, completions: Sequence[Rollout], expected_answer: Any):
        match expected_answer:
            case "exit":
                os._exit(3)
            case "crash":
                ctypes.string_at(0)
        return super().reward(completions, expected_answer)


class Moody(LowTokens):
    """A reward function that raises for every fourth group."""

    @dataclass(kw_only=True, slots=True)
    class Config(LowTokens.Config):
        name: str = "moody"
        always: bool = False

    config: Config

    def train_example(self, index: int):
        example = super().train_example(index)
        fails = self.config.always or index % 4 == 1
        return replace(example, expected_answer="raise" if fails else None)
