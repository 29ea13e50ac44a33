"""The actor that runs a task's tools and answers."""

from dataclasses import dataclass

from torchtitan_rl.config.resume import Fixed


@dataclass(kw_only=True, slots=True)
class EnvironmentConfig:
    """The actor that runs a task's tools and answers; started only if a task has any."""

    timeout_seconds: Fixed[float] = 30.0
    """Longest time of one tool call, or of one answer of the task, in seconds."""
    concurrent_calls: int = 16
    """Most tool calls at a time; others wait, and that does not count as their time."""
    max_result_chars: Fixed[int] = 8192
    """Most characters of a tool's result, or of a task's answer; more is cut, and the message says
    so."""

    def __post_init__(self) -> None:
        for name in ("timeout_seconds", "concurrent_calls", "max_result_chars"):
            if not getattr(self, name) > 0:
                raise ValueError(f"rollout.environment.{name} must be positive")
