"""What a task is: where prompts come from and what a completion is worth.

A task is a class with three methods and a nested `Config`; see `sum_digits.py` for one in full.
"""

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan.config import Configurable

from torchtitan_rl.types import Completion

Message = dict[str, Any]


@dataclass(slots=True)
class Example:
    """One prompt, as chat messages, and what the reward function will be told."""

    messages: list[Message]
    expected_answer: Any


@dataclass(slots=True)
class Reward:
    """What one completion is worth."""

    value: float
    correct: bool
    """Counts towards accuracy."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the value, for the log only."""


class Task(Configurable, ABC):
    """Subclass this, name it in `Config.name`, and use it in a recipe.

    Examples are a function of their index, so a resumed run sees exactly what it would have seen.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        name: str = "task"
        """In metrics, logs and errors."""

    config: Config

    def __init__(self, config: Config, *, seed: int = 0) -> None:
        self.config = config
        self.seed = seed

    @property
    def name(self) -> str:
        return self.config.name

    @abstractmethod
    def train_example(self, index: int) -> Example:
        """Example `index` of an endless stream; never one that `heldout_examples` can return.

        A warm start asks for negative indices, so that the run itself sees other examples.
        """

    @abstractmethod
    def heldout_examples(self, count: int) -> list[Example]:
        """`count` distinct examples for evaluation, always the same ones."""

    @abstractmethod
    def reward(
        self, completions: Sequence[Completion], expected_answer: Any
    ) -> Sequence[Reward | float]:
        """The worth of each completion of one prompt group, in order.

        A plain float is a reward with no parts that counts as correct from 1.0 up.
        """

    def demonstration(self, example: Example, rng: random.Random) -> str:
        """A completion to imitate, for a supervised warm start. Only needed for that."""
        raise NotImplementedError(
            f"task {self.name!r} has no demonstrations; define `demonstration` or start from a "
            "model that needs no warm start"
        )


def is_heldout(question: str, share: float) -> bool:
    """Whether a question belongs to evaluation: decided by its hash, so by no seed and no order.

    Example:
        >>> sum(is_heldout(str(i), 0.1) for i in range(10_000)) in range(900, 1100)
        True
    """
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64 < share
