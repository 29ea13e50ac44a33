"""When a run saves, and how much it keeps."""

from dataclasses import dataclass
from typing import Literal

AsyncMode = Literal["disabled", "async"]
"""Whether checkpoints are written while training goes on; torchtitan's names."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When to save what a resumed run needs."""

    every: int = 10
    """Steps between two checkpoints. A run also saves after its last step, and on Ctrl-C."""
    keep: int = 2
    """Newest checkpoints to keep; 0 keeps all."""
    async_mode: AsyncMode = "disabled"
    """`async`: copy the state to the CPU's memory and write it while the next steps run. It costs
    memory for one more copy of each rank's share of weights and optimizer, 12 bytes for each of its
    parameters. A run that is killed meanwhile resumes from the checkpoint before; one that ends, or
    is stopped with Ctrl-C, waits for the last."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"checkpoint.every must be at least 1; got {self.every}")
        if self.keep == 1 or self.keep < 0:
            raise ValueError(
                f"checkpoint.keep must be 0 (all) or at least 2, because the newest may be "
                f"half-written; got {self.keep}"
            )
