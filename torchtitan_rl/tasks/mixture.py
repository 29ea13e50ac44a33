"""Task made of several tasks."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan_rl.core.types import Rollout
from torchtitan_rl.tasks.checked import build, heldout_examples, train_example
from torchtitan_rl.tasks.task import Example, Reward, Task


class Mixture(Task):
    """Prompts of several tasks, drawn by weight; each task grades its own samples.

    Example:
        Mixture.Config(tasks=[Calculator.Config(), Spelling.Config()], weights=[3.0, 1.0])
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        name: str = "mixture"
        tasks: list[Task.Config] = field(default_factory=list)
        """Tasks that are mixed; no two may have the same name."""
        weights: list[float] = field(default_factory=list)
        """Relative frequency of each task's prompts; empty: all alike."""

        def __post_init__(self) -> None:
            if not self.tasks:
                raise ValueError("task.tasks is empty: a mixture needs at least one task")
            names = [task.name for task in self.tasks]
            if len(set(names)) < len(names):
                raise ValueError(f"tasks of a mixture need names of their own; got {names}")
            if any(isinstance(task, Mixture.Config) for task in self.tasks):
                raise ValueError("a mixture of mixtures is one mixture: list all their tasks")
            if self.weights and (len(self.weights) != len(names) or min(self.weights) <= 0):
                raise ValueError(
                    f"task.weights needs a positive number for each of {names}; got {self.weights}"
                )
            if self.sampling or self.echo or not self.show_tools:
                raise ValueError(
                    "a mixture has no sampling, echo or show_tools: set them on its tasks"
                )

        def parts(self) -> tuple[Task.Config, ...]:
            return tuple(self.tasks)

        def without_echo(self) -> "Mixture.Config":
            return replace(self, tasks=[task.without_echo() for task in self.tasks])

    config: Config

    def __init__(self, config: Config, *, seed: int = 0) -> None:
        super().__init__(config, seed=seed)
        self._members: dict[str, Task] = {t.name: build(t, seed=seed) for t in config.tasks}
        self._weights = config.weights or [1.0] * len(config.tasks)

    def members(self) -> dict[str, Task]:
        return self._members

    def train_example(self, index: int) -> Example:
        rng = random.Random(f"{self.seed}/mixture/{index}")
        [task] = rng.choices(list(self._members.values()), self._weights)
        return replace(train_example(task, index), task=task.name)

    def heldout_examples(self, count: int) -> list[Example]:
        """Held-out examples of every task: a share by weight, and at least one."""
        total = sum(self._weights)
        bounds = [0.0]
        for weight in self._weights:
            bounds.append(bounds[-1] + weight)
        starts = [round(count * bound / total) for bound in bounds]
        return [
            replace(example, task=task.name)
            for task, start, stop in zip(self._members.values(), starts, starts[1:], strict=False)
            for example in heldout_examples(task, max(stop - start, 1))
        ]

    def reward(
        self, completions: Sequence[Rollout], expected_answer: Any
    ) -> Sequence[Reward | float]:
        raise TypeError("a mixture has no reward of its own: ask the task of the example")

    def demonstration(self, example: Example, rng: random.Random) -> str | list[dict[str, Any]]:
        return self._members[example.task].demonstration(example, rng)
