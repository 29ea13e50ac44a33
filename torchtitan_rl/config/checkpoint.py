"""When a run saves, and how much it keeps."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When to save what a resumed run needs."""

    every: int = 10
    """Save after every so many steps, after the last, and on Ctrl-C."""
    keep: int = 2
    """Newest checkpoints to keep; 0 keeps all."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"checkpoint.every must be at least 1; got {self.every}")
        if self.keep == 1 or self.keep < 0:
            raise ValueError(
                f"checkpoint.keep must be 0 (all) or at least 2, because the newest may be "
                f"half-written; got {self.keep}"
            )
