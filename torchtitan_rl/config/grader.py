"""The actor that calls the task's reward function."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class GraderConfig:
    """The actor that calls the task's reward function."""

    timeout_seconds: float = 60.0
    """Longest time of a reward function for one group, in seconds."""

    def __post_init__(self) -> None:
        if self.timeout_seconds <= 0:
            raise ValueError("rollout.grader.timeout_seconds must be positive")
