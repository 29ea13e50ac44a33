"""The groups of one step: how many it runs and tries, and which indices they have. Pure."""

import asyncio
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

Work = TypeVar("Work")
Kind = Literal["trained", "dropped", "failed", "timed_out", "cancelled"]

SPARES, SPARES_PER_STEP = 2**40, 2**20
"""Where the indices begin that replace failed groups, and how many each step has."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig:
    """How many groups a step trains, how far ahead they start, and when to give up."""

    prompts_per_step: int
    """Groups that a step trains."""
    max_offpolicy_steps: int = 0
    """S: most training steps between the start of a group and the step that trains it."""
    max_groups_per_step: int = 0
    """Most groups a step tries, failed ones apart, to find enough useful ones; then it trains with
    those it has. 0: prompts_per_step + oversample."""
    oversample: int = 0
    """Groups a step runs beyond those it needs; the slowest are cancelled when it has enough."""
    timeout_seconds: float = 600.0
    """Longest a group may take, from its start."""
    deadline_seconds: float = 1800.0
    """Longest a step waits for its groups."""
    max_failures_in_a_row: int = 0
    """Groups that may fail with none finishing in between. 0: twice as many as can run at once."""

    def __post_init__(self) -> None:
        at_once, most = self.prompts_per_step + self.oversample, self.max_groups_per_step
        if self.prompts_per_step < 1:
            raise ValueError(f"prompts_per_step must be at least 1; got {self.prompts_per_step}")
        for name in ("max_offpolicy_steps", "oversample", "max_failures_in_a_row"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative; got {getattr(self, name)}")
        if most and most < at_once:
            raise ValueError(
                f"rollout.max_groups_per_step ({most}) must be at least prompts_per_step + "
                f"rollout.oversample ({at_once}), or 0 for exactly that"
            )
        if not 0 < self.timeout_seconds < self.deadline_seconds:
            raise ValueError(
                f"rollout.timeout_seconds ({self.timeout_seconds}) must be positive and shorter "
                f"than deadline_seconds ({self.deadline_seconds}), or one group that hangs ends "
                "the run"
            )

    @property
    def tries(self) -> int:
        """Groups that a step may try, failed ones apart."""
        return self.max_groups_per_step or self.prompts_per_step + self.oversample

    @property
    def failures_allowed(self) -> int:
        at_once = (self.max_offpolicy_steps + 1) * (self.prompts_per_step + self.oversample)
        return self.max_failures_in_a_row or 2 * at_once

    def index(self, step: int, number: int) -> int:
        """The index of a step's group `number`. No two groups of a run share one.

        Example: with 4 tries a step, step 3 has 12, 13, 14, 15. If one of these fails, a fifth
        group starts with the step's first spare index, as 16 belongs to step 4.
        """
        if number < self.tries:
            return step * self.tries + number
        return SPARES + step * SPARES_PER_STEP + number - self.tries


@dataclass(frozen=True, slots=True)
class Untrained(Generic[Work]):
    """A group that ended, but not in training."""

    work: Work
    index: int
    step: int
    kind: Kind
    reason: str


@dataclass(slots=True, eq=False)
class Running(Generic[Work]):
    """A group under way."""

    work: Work
    index: int
    plan: "Plan[Work]"
    version: int
    since: float
    task: asyncio.Task[None]
    timer: asyncio.TimerHandle


@dataclass(slots=True, eq=False)
class Plan(Generic[Work]):
    """The groups of one step."""

    step: int
    starts: int = 0
    failures: int = 0
    running: dict[int, Running[Work]] = field(default_factory=dict)
    ready: dict[int, Work] = field(default_factory=dict)

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
            f"(started at version {run.version})"
            for run in oldest[:8]
        ]
        more = [f"{len(oldest) - 8} more"] if len(oldest) > 8 else []
        return (
            f"{len(self.ready)} of {config.prompts_per_step} groups are ready, {self.starts} were "
            f"started, {self.failures} failed, and {len(oldest)} run: {', '.join(shown + more)}. "
            "Raise deadline_seconds if they only need longer"
        )
