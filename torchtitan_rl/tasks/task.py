"""Base class of tasks: where prompts come from and what a sample is worth.

A task is a class with three methods and a nested `Config`; see `sum_digits.py` for a complete one,
and `calculator.py` for one with tools.
"""

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

from torchtitan_rl.algorithms.echo import check_filter
from torchtitan_rl.config.task import TaskConfig
from torchtitan_rl.core.configurable import Configurable
from torchtitan_rl.core.plugins import nearest
from torchtitan_rl.core.types import Message, Rollout
from torchtitan_rl.tasks.tools.tool import Tool, find_tools


@dataclass(slots=True)
class Example:
    """One prompt, as chat messages, and the expected answer for the reward function."""

    messages: list[Message]
    expected_answer: Any
    state: dict[str, Any] = field(default_factory=dict)
    """State that tools and `Task.answer` may read and change; each conversation has its own
    copy."""
    task: str = ""
    """Name of the example's task, set by a mixture of tasks."""


@dataclass(slots=True)
class Reward:
    """Reward of one sample."""

    value: float
    correct: bool
    """Whether the sample counts as correct in the accuracy."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the value, for the log only."""


class Task(Configurable, ABC):
    """Base class of tasks: subclass it, name the task in `Config.name`, and use it in a recipe.

    Examples depend on their index alone, so a resumed run sees exactly the examples that it would
    have seen.
    """

    Config: TypeAlias = TaskConfig

    config: Config
    group_scoring: ClassVar[bool] = False
    """Whether `reward` needs all samples of a prompt: if one fails, the whole group fails."""
    state_columns: ClassVar[Sequence[str]] = ()
    """Entries of a conversation's state that are saved with its rollout."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        defined = [name for name in cls.__dict__ if not name.startswith("_")]
        # Nothing defined: a notebook's class that is being unpickled, and gets its methods later.
        if defined and "Config" not in defined:
            raise TypeError(
                f"task {cls.__name__} needs a Config of its own, or {cls.__mro__[1].__name__} is "
                f"built in its place: add `@dataclass(kw_only=True, slots=True) class "
                f"Config({cls.__mro__[1].__name__}.Config)` with its name"
            )
        super().__init_subclass__(**kwargs)

    def __init__(self, config: Config, *, seed: int = 0) -> None:
        self.config = config
        self.seed = seed

    @property
    def name(self) -> str:
        """Name of the task in metrics, logs and errors."""
        return self.config.name

    @abstractmethod
    def train_example(self, index: int) -> Example:
        """Example `index` of an endless stream; never one that `heldout_examples` can return.

        A warm start uses negative indices, so that the run itself sees other examples.
        """

    @abstractmethod
    def heldout_examples(self, count: int) -> list[Example]:
        """`count` distinct examples for evaluation, always the same ones; a task that has fewer,
        but at least one, may return all it has."""

    @abstractmethod
    def reward(
        self, completions: Sequence[Rollout], expected_answer: Any
    ) -> Sequence[Reward | float]:
        """Rewards of the samples of one prompt group, in order.

        `text` of a sample is the model's last message, `messages` the whole conversation, `state`
        the example's state as the tools have left it. A plain float is a reward without parts that
        counts as correct from 1.0 up.
        """

    def all_examples(self) -> Iterable[tuple[str, Example]]:
        """All examples of a finite task, each with where it comes from, so that one that is too
        long is found before the run; empty for a task without end."""
        return ()

    def answer(self, messages: list[Message], state: dict[str, Any]) -> list[Message]:
        """Messages that answer the model when it has called no tool; none ends the conversation.

        `state` may be changed. Only needed for tasks in which somebody answers, such as a user.
        """
        return []

    def demonstration(self, example: Example, rng: random.Random) -> str | list[Message]:
        """A demonstration for a supervised warm start: the model's text, or all messages that
        follow the prompt. Only needed for a warm start."""
        raise NotImplementedError(
            f"task {self.name!r} has no demonstrations; define `demonstration` or start from a "
            "model that needs no warm start"
        )

    def members(self) -> dict[str, "Task"]:
        """Tasks that a mixture is made of, by name; any other task has itself alone."""
        return {self.name: self}

    @cached_property
    def tools(self) -> dict[str, Tool]:
        """Methods of the task that are marked `@tool`, by name."""
        return find_tools(self)

    def check(self) -> None:
        """Refuse settings without effect, before any process starts."""
        if self.config.echo:
            check_filter(self.config.echo)
        echo = self.config.echo.tool if self.config.echo else None
        if echo and not self.tools:
            raise ValueError(f"echo.tool of task {self.name!r}: it has no tools")
        for name in (echo.tool_names if echo else None) or ():
            if name not in self.tools:
                raise ValueError(
                    f"echo.tool.tool_names of task {self.name!r}: it has no tool {name!r}; "
                    f"{nearest(name, self.tools)}"
                )

    @cached_property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """Descriptions of the tools for the prompt; None if prompts describe none."""
        specs = [tool.spec for tool in self.tools.values()] if self.config.show_tools else []
        return specs or None

    @cached_property
    def answers(self) -> bool:
        """Whether the task may answer the model when it has called no tool."""
        return type(self).answer is not Task.answer

    @property
    def interactive(self) -> bool:
        """Whether a conversation may go on after the model's first turn."""
        return bool(self.tools) or self.answers


def is_heldout(question: str, share: float) -> bool:
    """Whether a question is held out for evaluation; decided by its hash, not by seed or order.

    Example:
        >>> sum(is_heldout(str(i), 0.1) for i in range(10_000)) in range(900, 1100)
        True
    """
    return in_share(question, share)


def in_share(name: str, share: float) -> bool:
    """Whether a name is in a share of all names; decided by its hash, not by seed or order."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64 < share
