"""Metrics of what was rolled out, for all tasks together and for each."""

from collections import defaultdict
from collections.abc import Iterable

from torchtitan_rl.observability.metrics import Distribution, Metrics
from torchtitan_rl.types import ScoredCompletion


def rollout_metrics(scored: Iterable[ScoredCompletion], task: str) -> Metrics:
    """`{metric}/{all,<task>}` over the samples of a step.

    Example:
        reward/all/mean, accuracy/sum_digits/mean, completion_tokens/all/max, truncated/all/mean
    """
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for sample in scored:
        columns["reward"].append(sample.reward)
        columns["accuracy"].append(float(sample.correct))
        columns["completion_tokens"].append(float(len(sample.completion.token_ids)))
        columns["truncated"].append(float(sample.completion.finish_reason == "length"))
        for name, value in sample.reward_parts.items():
            columns[f"reward_part/{name}"].append(value)
    return {
        f"{name}/{who}": Distribution.of(values)
        for name, values in columns.items()
        for who in ("all", task)
    }
