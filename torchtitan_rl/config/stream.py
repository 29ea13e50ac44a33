"""How groups run ahead of their step: derived from a run's settings, see `RunConfig.stream`."""

from dataclasses import dataclass

SPARES, SPARES_PER_STEP = 2**40, 2**20
"""Where the indices begin that replace failed groups, and how many each step has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig:
    """How many groups a step trains, how far ahead they start, and when to give up."""

    prompts_per_step: int
    """Groups that a step trains."""
    max_offpolicy_steps: int = 0
    """S: most training steps between the start of a group and the step that trains it."""
    max_groups_per_step: int = 0
    """Most groups that a step tries, without failed ones, to find enough useful ones; then it
    trains on those it has. 0: prompts_per_step + oversample."""
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
                f"than supervision.deadline_seconds ({self.deadline_seconds}), or one group that "
                "hangs ends the run"
            )

    @property
    def tries(self) -> int:
        """Groups that a step may try, failed ones apart."""
        return self.max_groups_per_step or self.prompts_per_step + self.oversample

    @property
    def failures_allowed(self) -> int:
        """Groups that may fail with none finishing in between."""
        at_once = (self.max_offpolicy_steps + 1) * (self.prompts_per_step + self.oversample)
        return self.max_failures_in_a_row or 2 * at_once

    def index(self, step: int, number: int) -> int:
        """The index of a step's group `number`. No two groups of a run share one.

        Example: with 4 tries per step, step 3 has 12, 13, 14, 15. If one of these fails, a fifth
        group starts with the step's first spare index, as 16 belongs to step 4.
        """
        if number < self.tries:
            return step * self.tries + number
        return SPARES + step * SPARES_PER_STEP + number - self.tries
