"""The groups of one step: how many it runs and tries, and which indices they have. Pure."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from torchtitan_rl.config.stream import SPARES, SPARES_PER_STEP, StreamConfig

Work = TypeVar("Work")
"""The type of a group while it runs."""
Result = TypeVar("Result")
"""The type of a group that has ended well."""
Kind = Literal["trained", "not_useful", "failed", "timed_out", "cancelled"]


def index_name(index: int) -> str:
    """An index as people read it, in names of groups; no two indices look the same.

    Example:
        >>> index_name(384), index_name(SPARES + 3 * SPARES_PER_STEP + 1)
        ('384', 'spare-3-1')
    """
    if index < SPARES:
        return str(index)
    step, number = divmod(index - SPARES, SPARES_PER_STEP)
    return f"spare-{step}-{number}"


@dataclass(frozen=True, slots=True)
class Discarded(Generic[Work, Result]):
    """A group that ended, but not in training."""

    work: Work
    index: int
    step: int
    kind: Kind
    reason: str
    result: Result | None = None
    """The result of a group that ended well and is not needed."""
    error: BaseException | None = None
    """The error that `play` raised, if it did."""


@dataclass(slots=True, eq=False)
class Running(Generic[Work, Result]):
    """A group under way."""

    work: Work
    index: int
    plan: "Plan[Work, Result]"
    steps_done: int
    """Training steps that were done when it started."""
    since: float
    task: asyncio.Task[Any]
    timer: asyncio.TimerHandle


@dataclass(slots=True, eq=False)
class Plan(Generic[Work, Result]):
    """The groups of one step."""

    step: int
    starts: int = 0
    failures: int = 0
    running: dict[int, Running[Work, Result]] = field(default_factory=dict)
    ready: dict[int, tuple[Work, Result]] = field(default_factory=dict)

    def wants_more(self, config: StreamConfig) -> bool:
        live, wanted = len(self.ready) + len(self.running), config.prompts_per_step
        return (
            len(self.ready) < wanted
            and live < wanted + config.oversample
            and self.starts - self.failures < config.tries
        )

    def complete(self, config: StreamConfig) -> bool:
        return bool(self.starts) and not self.running and not self.wants_more(config)

    def state(self, config: StreamConfig, now: float) -> str:
        """Which groups are there, and which are waited for since when; the oldest first."""
        oldest = sorted(self.running.values(), key=lambda run: run.since)
        shown = [
            f"group {index_name(run.index)} for {now - run.since:.1f} s "
            f"(started after {run.steps_done} steps)"
            for run in oldest[:8]
        ]
        more = [f"{len(oldest) - 8} more"] if len(oldest) > 8 else []
        return (
            f"{len(self.ready)} of {config.prompts_per_step} groups are ready, {self.starts} were "
            f"started, {self.failures} failed, and {len(oldest)} run: {', '.join(shown + more)}. "
            "Raise supervision.deadline_seconds if they only need longer"
        )
