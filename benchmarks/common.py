"""What benchmarks share: JSON lines to standard output, progress to standard error."""

import json
import sys

from torchtitan_rl.observability.console import console
from torchtitan_rl.recipes import registry as recipes
from torchtitan_rl.run.controller import Controller

console.file = sys.stderr


def tiny_recipe() -> Controller.Config:
    """The recipe of `make train`; benchmarks run from the repository's root."""
    return recipes.build_recipe("grpo_sum_digits_tiny", recipes.built_in_recipes())


def report(benchmark: str, metric: str, case: str, value: float) -> None:
    """Print one result.

    Example:
        {"benchmark": "overhead", "metric": "actor_vs_engine", "case": "tiny", "value": 0.98}
    """
    row = {"benchmark": benchmark, "metric": metric, "case": case, "value": value}
    print(json.dumps(row), flush=True)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
