"""The actor that hosts a task's tools."""

from dataclasses import dataclass

from torchtitan_rl.config.resume import Fixed


@dataclass(kw_only=True, slots=True)
class EnvironmentConfig:
    """Hosts a task's tools; spawned only when a task has any, or answers the model."""

    timeout_seconds: Fixed[float] = 30.0
    """Longest a tool may take for one call, and a task for one answer."""
    concurrent_calls: int = 16
    """Tool calls at a time; the others wait for their turn, which is no part of their time."""
    max_result_chars: Fixed[int] = 8192
    """Most characters of a tool's result, or of a task's answer; more is cut, and the message says
    so."""

    def __post_init__(self) -> None:
        for name in ("timeout_seconds", "concurrent_calls", "max_result_chars"):
            if not getattr(self, name) > 0:
                raise ValueError(f"rollout.environment.{name} must be positive")
