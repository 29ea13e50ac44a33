"""When a run evaluates, and on how much."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    """Greedy evaluation on held-out prompts."""

    every: int = 10
    """Steps between two evaluations. The first one is before step 0, the last after all steps."""
    prompts: int = 200
    """Number of held-out prompts; all of them, if the task has fewer."""

    def __post_init__(self) -> None:
        if self.every < 1 or self.prompts < 1:
            raise ValueError("evaluation.every and evaluation.prompts must be at least 1")
