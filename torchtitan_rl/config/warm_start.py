"""How the tiny starting model is made."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class WarmStartConfig:
    """How the tiny starting model is made, by imitation of a task's demonstrations."""

    steps: int = 450
    """Most supervised steps; the learning rate falls to 0 over them."""
    demonstrations_per_step: int = 32
    """Demonstrations in one supervised step."""
    enough_accuracy: float = 0.5
    """Imitation stops when at least this share of samples of held-out prompts is right. They are
    sampled as in the run, because RL starts from there. More leaves RL less to learn."""
    evaluate_every: int = 25
    """Supervised steps between two evaluations."""
    lr: float = 2e-3
    """Learning rate of imitation after warm-up."""
    warmup_steps: int = 20
    """Supervised steps in which the learning rate rises to `lr`."""
    experts: int = 0
    """Number of experts of the model; each token uses two of them. 0: a dense model."""
    cache_dir: str = "outputs/models"
    """Folder in which starting models are kept."""

    def __post_init__(self) -> None:
        if not 0 < self.enough_accuracy <= 1:
            raise ValueError(
                f"warm_start.enough_accuracy must be in (0, 1]; got {self.enough_accuracy}"
            )
        if min(self.steps, self.demonstrations_per_step, self.evaluate_every) < 1:
            raise ValueError("warm_start counts must be at least 1")
        if self.experts < 0 or self.experts == 1:
            raise ValueError(
                f"warm_start.experts must be 0 (dense) or at least 2; got {self.experts}"
            )
