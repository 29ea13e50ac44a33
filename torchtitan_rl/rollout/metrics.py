"""Metrics of what was rolled out, for all tasks together and for each."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from typing import get_args

from torchtitan_rl.core.metrics import Distribution, Metrics, flatten
from torchtitan_rl.core.types import ENDS, Outcome, Status
from torchtitan_rl.rollout.failures import CHOSEN, Failure
from torchtitan_rl.rollout.record import RolloutRecord


def rollout_metrics(records: Iterable[RolloutRecord], interactive: Collection[str] = ()) -> Metrics:
    """`{metric}/{all,<task>}` over the graded rollouts of a step that were not discarded; those of
    `interactive` tasks also have metrics of turns, tools and how they ended.

    Example:
        reward/all/mean, accuracy/sum_digits/mean, completion_tokens/all/max, truncated/all/mean
    """
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for record in graded(records):
        values = _values(record)
        if record.task in interactive:
            values |= _conversation_values(record)
        for name, value in values.items():
            for who in ("all", record.task):
                columns[f"{name}/{who}"].append(value)
    return {name: Distribution.of(values) for name, values in columns.items()}


def graded(records: Iterable[RolloutRecord]) -> list[RolloutRecord]:
    """The rollouts with a reward that were not discarded."""
    return [r for r in records if r.split != "discarded" and r.reward is not None]


def _values(record: RolloutRecord) -> dict[str, float]:
    assert record.reward is not None
    return {
        "reward": record.reward,
        "accuracy": float(bool(record.correct)),
        "completion_tokens": float(record.tokens),
        "truncated": float(record.status == Status.TRUNCATED),
        **{f"reward_part/{name}": value for name, value in record.reward_parts.items()},
    }


def _conversation_values(record: RolloutRecord) -> dict[str, float]:
    return {
        "turns": float(record.turns),
        **{
            f"tool_calls/{outcome}": float(record.tool_calls.count(outcome))
            for outcome in get_args(Outcome)
        },
        **{f"status/{status}": float(record.status == status) for status in ENDS},
    }


def failure_metrics(failures: Iterable[Failure], tasks: Iterable[str]) -> dict[str, float]:
    """Counts of lost rollouts, `rollouts/<kind>/<who>`, and of groups that go on
    without some of their samples, or not at all."""
    counts: defaultdict[str, float] = defaultdict(float)
    for who in ("all", *tasks):
        for kind in ("failed", "timed_out", "empty"):
            counts[f"rollouts/{kind}/{who}"] = 0.0
    partial, failed = defaultdict[str, set](set), defaultdict[str, set](set)
    for failure in failures:
        for who in ("all", failure.task):
            counts[f"rollouts/{failure.kind}/{who}"] += failure.rollouts
            if failure.kind not in CHOSEN:
                (partial if failure.partial else failed)[who].add(failure.group)
    for who in ("all", *tasks):
        counts[f"groups/partial/{who}"] = len(partial[who])
        counts[f"groups/failed/{who}"] = len(failed[who])
    return dict(counts)


def evaluation_metrics(records: Iterable[RolloutRecord]) -> dict[str, float]:
    """Accuracy and reward of all, and of each task if there are several; and of how many prompts.

    Example:
        eval/accuracy, eval/reward, eval/accuracy/calculator, eval/prompts, eval/prompts/calculator
    """
    samples = graded(records)
    means = flatten(rollout_metrics(samples))
    counts = Counter(record.task for record in samples)
    several = sorted(counts) if len(counts) > 1 else []
    found = {
        f"eval/{name}{suffix}": means[f"{name}/{who}/mean"]
        for name in ("accuracy", "reward")
        for who, suffix in [("all", ""), *((task, f"/{task}") for task in several)]
    }
    of_tasks = {f"eval/prompts/{task}": float(counts[task]) for task in several}
    return {**found, "eval/prompts": len(samples), **of_tasks}
