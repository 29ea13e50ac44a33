"""The frozen starting model of the reference KL."""

from dataclasses import dataclass, field

from torchtitan_rl.config.dtype import Dtype
from torchtitan_rl.config.parallelism import Parallelism
from torchtitan_rl.config.resume import Fixed


@dataclass(kw_only=True, slots=True)
class ReferenceConfig:
    """The frozen starting model, on processes of its own; only with `trainer.loss.ref_kl`."""

    parallelism: Parallelism = field(default_factory=Parallelism)
    dtype: Fixed[Dtype] = "auto"
    """Number type of the reference; `auto`: float32 on a CPU, bfloat16 on a GPU."""
    threads: int = 1
    """CPU threads of each rank of the reference."""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"trainer.reference.threads must be at least 1; got {self.threads}")
