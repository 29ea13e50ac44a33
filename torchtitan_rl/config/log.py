"""What a run writes beside its metrics."""

import importlib.util
from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class LogConfig:
    """What a run writes to its folder beside metrics and checkpoints, and where else metrics go."""

    rollouts: bool = True
    """Write every rollout to the run's `rollouts` folder, one file per step."""
    samples: bool = True
    """Show a sample on the console at the first step, when all rewards of a step are equal, and at
    each evaluation."""
    timeline: bool = True
    """Write when each actor was called, and for how long, to the run's `timeline.json`."""
    wandb_project: str = ""
    """Project of Weights & Biases to which the metrics are sent too; wandb must be installed.
    Empty: none."""

    def __post_init__(self) -> None:
        if self.wandb_project and importlib.util.find_spec("wandb") is None:
            raise ValueError(
                f"log.wandb_project is {self.wandb_project!r}, but wandb is not installed: leave "
                "it empty, or run python -m pip install wandb"
            )
