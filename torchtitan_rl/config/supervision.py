"""How long a run waits, and when it stops by itself."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class SupervisionConfig:
    """How long a run waits for its actors, and when it gives up."""

    deadline_seconds: float = 1800.0
    """Longest wait for any one reply of an actor."""
    most_untrainable_steps: int = 20
    """Stop after so many steps in a row in which no group had differing rewards, or in which every
    call of a tool raised."""
    most_failed_tool_calls: int = 64
    """Stop after so many calls of a tool in a row that failed by the tool's own fault: it took too
    long, ended its process, or raised an exception that is not about its arguments."""

    def __post_init__(self) -> None:
        for name in ("deadline_seconds", "most_untrainable_steps", "most_failed_tool_calls"):
            if not getattr(self, name) > 0:
                raise ValueError(f"supervision.{name} must be positive; got {getattr(self, name)}")
