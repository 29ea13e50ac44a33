"""Metrics of what was rolled out, for all tasks together and for each."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, get_args

from torchtitan_rl.core.metrics import Distribution, Metrics, flatten
from torchtitan_rl.core.types import Outcome, Rollout, ScoredCompletion, Status

if TYPE_CHECKING:
    from torchtitan_rl.rollout.loop import Failure


def rollout_metrics(
    scored: Iterable[tuple[str, ScoredCompletion]], interactive: Collection[str] = ()
) -> Metrics:
    """`{metric}/{all,<task>}` over the samples of a step, each with the name of its task; those of
    `interactive` tasks also tell of turns, tools and how they ended.

    Example:
        reward/all/mean, accuracy/sum_digits/mean, completion_tokens/all/max, truncated/all/mean
    """
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for task, sample in scored:
        values = _values(sample)
        if task in interactive:
            values |= _conversation_values(sample)
        for name, value in values.items():
            for who in ("all", task):
                columns[f"{name}/{who}"].append(value)
    return {name: Distribution.of(values) for name, values in columns.items()}


def _values(sample: ScoredCompletion) -> dict[str, float]:
    rollout = _rollout(sample)
    return {
        "reward": sample.reward,
        "accuracy": float(sample.correct),
        "completion_tokens": float(len(rollout.token_ids)),
        "truncated": float(rollout.status == "truncated"),
        **{f"reward_part/{name}": value for name, value in sample.reward_parts.items()},
    }


def _conversation_values(sample: ScoredCompletion) -> dict[str, float]:
    rollout = _rollout(sample)
    return {
        "turns": float(len(rollout.completions)),
        **{
            f"tool_calls/{outcome}": float(rollout.outcomes.count(outcome))
            for outcome in get_args(Outcome)
        },
        **{f"status/{status}": float(rollout.status == status) for status in get_args(Status)},
    }


def _rollout(sample: ScoredCompletion) -> Rollout:
    assert isinstance(sample.completion, Rollout)
    return sample.completion


CHOSEN = ("dropped", "cancelled")
"""Kinds of failures that are none: dynamic sampling and oversampling leave groups out."""


def failure_metrics(failures: Iterable["Failure"], tasks: Iterable[str]) -> dict[str, float]:
    """What came to nothing: `rollouts/<kind>/<who>`, and groups that go on without some of their
    samples, or not at all."""
    counts: defaultdict[str, float] = defaultdict(float)
    for who in ("all", *tasks):
        for kind in ("failed", "timed_out", "empty"):
            counts[f"rollouts/{kind}/{who}"] = 0.0
    partial, dropped = defaultdict[str, set](set), defaultdict[str, set](set)
    for failure in failures:
        for who in ("all", failure.task):
            counts[f"rollouts/{failure.kind}/{who}"] += failure.rollouts
            if failure.kind in CHOSEN:
                continue
            (partial if failure.partial else dropped)[who].add(failure.group)
    for who in ("all", *tasks):
        counts[f"groups/partial/{who}"] = len(partial[who] - dropped[who])
        counts[f"groups/dropped/{who}"] = len(dropped[who])
    return dict(counts)


def evaluation_metrics(scored: Iterable[tuple[str, ScoredCompletion]]) -> dict[str, float]:
    """Accuracy and reward of all, and of each task if there are several; and of how many prompts.

    Example:
        eval/accuracy, eval/reward, eval/accuracy/calculator, eval/prompts
    """
    samples = list(scored)
    means = flatten(rollout_metrics(samples))
    several = {task for task, _ in samples} if len({task for task, _ in samples}) > 1 else set()
    found = {
        f"eval/{name}{suffix}": means[f"{name}/{who}/mean"]
        for name in ("accuracy", "reward")
        for who, suffix in [("all", ""), *((task, f"/{task}") for task in sorted(several))]
    }
    return {**found, "eval/prompts": len(samples)}
