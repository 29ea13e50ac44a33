"""When a run evaluates, and on how much."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    """Greedy evaluation on held-out prompts."""

    every: int = 10
    """Evaluate before every so many steps, and after the last."""
    prompts: int = 200
    """Held-out prompts; all there are, where a file has fewer."""

    def __post_init__(self) -> None:
        if self.every < 1 or self.prompts < 1:
            raise ValueError("evaluation.every and evaluation.prompts must be at least 1")
