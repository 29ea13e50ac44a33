"""The trainer: optimizer, schedule, loss, batches, parallelism."""

from dataclasses import dataclass, field
from typing import Literal

from torchtitan_rl.config.backends import TRAINER_BACKENDS, check_backend
from torchtitan_rl.config.batch_filter import BatchFilterConfig
from torchtitan_rl.config.dtype import Dtype
from torchtitan_rl.config.loss import LossConfig
from torchtitan_rl.config.parallelism import Parallelism
from torchtitan_rl.config.reference import ReferenceConfig
from torchtitan_rl.config.renames import refuse_old_names
from torchtitan_rl.config.resume import Fixed
from torchtitan_rl.config.weight_sync import WeightSyncConfig

Overlong = Literal["error", "truncate", "drop"]
"""What to do with an episode that does not fit a microbatch."""
Checkpointing = Literal["auto", "none", "selective", "full"]
"""Which activations a layer recomputes in the backward pass."""
GradientSync = Literal["every_microbatch", "last_microbatch"]
"""After which backward passes of an update the ranks add up their gradients."""


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer, AdamW."""

    lr: float = 1e-6
    """Learning rate after warm-up."""
    betas: Fixed[tuple[float, float]] = (0.9, 0.99)
    """Decay of AdamW's running means of the gradient and of its square."""
    eps: Fixed[float] = 1e-8
    """Added to the root of the mean square gradient, against division by 0."""
    weight_decay: float = 0.0
    """An optimizer step lowers each weight by this share, times the learning rate."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"optimizer.lr must be positive; got {self.lr}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must lie in [0, 1); got {self.betas}")


@dataclass(kw_only=True, slots=True)
class LRScheduleConfig:
    """torchtitan's schedule of the learning rate, under its names: warm-up, stable, decay."""

    warmup_steps: int = 200
    """Steps in which the learning rate rises from 0 to trainer.optimizer.lr."""
    total_steps: int | None = None
    """Steps of the whole schedule; None: the steps of the run."""
    decay_ratio: float | None = None
    """Share of the steps, at the end, in which the learning rate falls. 0: it stays the same. None:
    it falls from the end of the warm-up on."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the learning rate's fall."""
    min_lr_factor: float = 0.0
    """Learning rate at the end of its fall, as a share of trainer.optimizer.lr."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(
                f"lr_scheduler.warmup_steps must be 0 or more; got {self.warmup_steps}"
            )
        if self.total_steps is not None and self.total_steps < 1:
            raise ValueError(f"lr_scheduler.total_steps must be at least 1; got {self.total_steps}")
        for name in ("decay_ratio", "min_lr_factor"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"lr_scheduler.{name} must be a share, in [0, 1]; got {value}")


def constant_lr(warmup_steps: int = 0) -> LRScheduleConfig:
    """A schedule that warms up and then stays: an RL run has no natural end to decay towards."""
    return LRScheduleConfig(warmup_steps=warmup_steps, decay_ratio=0.0)


def annealed_lr(warmup_steps: int = 0, last: float = 0.5) -> LRScheduleConfig:
    """A schedule that warms up, stays, and falls to 0 over the last share of the steps."""
    return LRScheduleConfig(warmup_steps=warmup_steps, decay_ratio=last)


@refuse_old_names("trainer")
@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """The actor that learns."""

    backend: Fixed[str] = "torchtitan"
    """Kind of trainer: torchtitan, simulated (learns nothing, to study scheduling), or
    `package.module:Class` of your own."""
    kwargs: Fixed[dict[str, float | str]] = field(default_factory=dict)
    """Keyword arguments of the backend's class, as names and values: `seconds_per_step 0.5`."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRScheduleConfig = field(default_factory=constant_lr)
    loss: Fixed[LossConfig] = field(default_factory=LossConfig)
    updates_per_step: Fixed[int] = 1
    """Optimizer steps on the episodes of one step; each takes an equal share of the groups."""
    batch_filter: Fixed[BatchFilterConfig] = field(default_factory=BatchFilterConfig)
    """Function of your own that chooses among the episodes of a step."""
    max_grad_norm: float = 1.0
    """Largest norm of the gradient; a larger gradient is scaled down to it."""
    tokens_per_microbatch: int = 16384
    """Most tokens in one forward pass of one rank."""
    overlong: Fixed[Overlong] = "error"
    """What to do with an episode of more than tokens_per_microbatch. error: end the run. truncate:
    cut off the end of its completion. drop: leave it out."""
    router_replay: Fixed[bool] = False
    """In a mixture of experts, route tokens as the generator did; the router still learns."""
    share_prompts: bool = False
    """Compute a prompt once for all its samples in a microbatch."""
    parallelism: Parallelism = field(default_factory=Parallelism)
    dtype: Fixed[Dtype] = "auto"
    """Number type of the trainer's computation; `auto`: float32 on a CPU, bfloat16 on a GPU.
    Weights are always float32. On a GPU, attention and experts always compute in bfloat16."""
    activation_checkpoint: Checkpointing = "auto"
    """Activation checkpointing: `full` recomputes each layer in the backward pass to save memory;
    `selective` keeps what is expensive, attention and every second matrix product, and recomputes
    the rest. `auto`: selective on a GPU, none on a CPU."""
    compile: bool = False
    """Compile each layer with torch.compile, which makes the first steps slower. It needs a
    compiler. On a GPU a layer that cannot be compiled as a whole is an error."""
    gradient_sync: GradientSync = "every_microbatch"
    """When ranks that share weights (FSDP) add up their gradients. `last_microbatch` saves a
    reduce-scatter of all gradients for every other microbatch, and costs memory: each rank keeps
    the gradients whole, 4 bytes for each parameter of the model, divided by the tensor parallel
    degree (experts: by the expert parallel degree). Copies of the model (HSDP) always wait for the
    last, which costs nothing."""
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    """The frozen starting model; started only if trainer.loss.ref_kl is on."""
    threads: int = 0
    """CPU threads of each trainer rank; 0: the cores that the process may use, divided by the
    ranks, or by the GPUs of the machine if these are more."""
    export_tokens: bool = False
    """Write what was computed for every token to the run's `tokens` folder."""

    def __post_init__(self) -> None:
        check_backend("trainer", self.backend, self.kwargs, TRAINER_BACKENDS)
        if self.tokens_per_microbatch < 1:
            raise ValueError("trainer.tokens_per_microbatch must be at least 1")
        if self.updates_per_step < 1:
            raise ValueError("trainer.updates_per_step must be at least 1")
        if not self.max_grad_norm > 0:
            raise ValueError("trainer.max_grad_norm must be positive")
