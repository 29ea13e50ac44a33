"""How long a run waits, and when it stops by itself."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class SupervisionConfig:
    """How long a run waits for its actors, and when it gives up."""

    deadline_seconds: float = 1800.0
    """Longest wait for one reply of an actor, in seconds."""
    grace_seconds: float | None = None
    """Longest time, after Ctrl-C or SIGTERM, to finish the training step under way and to save.
    None: 1.5 s, the longest training step so far, and what writing the model's state takes at 0.5
    GB/s a rank. A batch system must wait as long before it kills."""
    most_untrainable_steps: int = 20
    """Stop after this many steps in a row with nothing to learn from, or in which every call of a
    tool raised an exception."""
    most_failed_tool_calls: int = 64
    """Stop after this many calls of a tool in a row that failed, if the tool is to blame: it took
    too long, ended its process, or raised an exception that is not about its arguments."""
    stop_on_collapse: bool = False
    """Stop a run that collapses: its reward or tool calls fall to nothing, its entropy is gone, or
    its KL or gradient explodes. Otherwise the console warns."""

    def __post_init__(self) -> None:
        for name in ("deadline_seconds", "most_untrainable_steps", "most_failed_tool_calls"):
            if not getattr(self, name) > 0:
                raise ValueError(f"supervision.{name} must be positive; got {getattr(self, name)}")
        if self.grace_seconds is not None and self.grace_seconds < 0:
            raise ValueError(
                f"supervision.grace_seconds must be 0 or more; got {self.grace_seconds}"
            )
