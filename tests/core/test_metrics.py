"""Metrics: merging is associative and does not care how the values were split."""

import statistics
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reads import counting
from tests.support import PROMPT, a_rollout, scored_group
from torchtitan_rl.config import AdvantageConfig
from torchtitan_rl.core.metrics import (
    Distribution,
    Mean,
    Same,
    Sum,
    by_task,
    fetch_numbers,
    flatten,
    merge_metrics,
)
from torchtitan_rl.core.types import Status
from torchtitan_rl.rollout.episodes import annotate
from torchtitan_rl.rollout.metrics import evaluation_metrics, rollout_metrics

# Whole numbers add up exactly in any order, so the laws can be checked with ==.
whole = st.integers(-1000, 1000).map(float)
counts = st.integers(0, 1000).map(float)
any_float = st.floats(-1e6, 1e6)

KINDS = {
    "mean": st.builds(Mean, whole, counts),
    "sum": st.builds(Sum, whole),
    "same": st.just(Same(0.25)),
    "distribution": st.lists(whole, max_size=5).map(Distribution.of),
}
of_each_kind = pytest.mark.parametrize("kind", KINDS)


@of_each_kind
@settings(deadline=None)
@given(data=st.data())
def test_merging_is_associative_and_commutative(kind, data):
    a, b, c = (data.draw(KINDS[kind]) for _ in range(3))
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(b) == b.merge(a)


@settings(deadline=None)
@given(parts=st.lists(st.lists(whole, max_size=6), min_size=1, max_size=6))
def test_parts_merge_to_the_whole_however_they_were_split(parts):
    values = [value for part in parts for value in part]
    merged = merge_metrics(
        {
            "distribution": Distribution.of(part),
            "mean": Mean(sum(part), len(part)),
            "sum": Sum(sum(part)),
        }
        for part in parts
    )
    assert merged == {
        "distribution": Distribution.of(values),
        "mean": Mean(sum(values), len(values)),
        "sum": Sum(sum(values)),
    }


@settings(deadline=None)
@given(values=st.lists(any_float, min_size=1, max_size=30))
def test_a_distribution_has_mean_deviation_and_maximum_of_its_values(values):
    numbers = Distribution.of(values).values()
    assert numbers["mean"] == pytest.approx(statistics.fmean(values), rel=1e-9, abs=1e-6)
    assert numbers["std"] == pytest.approx(statistics.pstdev(values), rel=1e-3, abs=0.1)
    assert numbers["max"] == max(values)


def test_the_deviation_is_exact_where_nothing_cancels():
    assert Distribution.of([1.0, 3.0, 5.0, 7.0]).values()["std"] == pytest.approx(5**0.5)


def test_a_distribution_takes_tensors_of_any_shape_and_dtype():
    values = [[1.0, 2.0], [4.0, 5.0]]
    expected = Distribution.of([1.0, 2.0, 4.0, 5.0])
    assert Distribution.of(torch.tensor(values, requires_grad=True)) == expected
    assert Distribution.of(torch.tensor(values, dtype=torch.bfloat16)) == expected


@pytest.mark.parametrize(
    "metric", [Mean(0.0, 0.0), Distribution(), Distribution.of([]), Distribution.of(torch.zeros(0))]
)
def test_no_value_gives_no_number(metric):
    assert metric.values() == {}
    assert flatten({"x": metric}) == {}


def test_no_value_changes_nothing_when_merged():
    assert Distribution().merge(Distribution.of([-5.0])).values()["max"] == -5.0
    assert Mean(0.0, 0.0).merge(Mean(6.0, 3.0)).values() == {"": 2.0}


def test_a_mean_is_weighted():
    assert Mean(6.0, 3.0).merge(Mean(0.0, 1.0)).values() == {"": 1.5}


@pytest.mark.parametrize(("one", "other"), [(1.0, 1.0), (1e-4, 1e-4 * (1 + 1e-6)), (0.0, 1e-13)])
def test_ranks_that_agree_keep_their_value(one, other):
    assert Same(one).merge(Same(other)) == Same(one)


@pytest.mark.parametrize(("one", "other"), [(1.0, 2.0), (1e-4, 1.001e-4), (0.0, 1e-3), (1.0, -1.0)])
def test_ranks_that_disagree_are_an_error_with_both_values(one, other):
    with pytest.raises(ValueError, match="disagree") as error:
        merge_metrics([{"train/lr": Same(one)}, {"train/lr": Same(other)}])
    assert str(one) in str(error.value)
    assert str(other) in str(error.value)


def test_a_key_may_be_missing_from_some():
    parts = [{"a": Sum(1), "b": Sum(10)}, {}, {"a": Sum(2)}, {"c": Sum(5)}]
    assert merge_metrics(parts) == {"a": Sum(3), "b": Sum(10), "c": Sum(5)}
    assert parts[0] == {"a": Sum(1), "b": Sum(10)}


def test_nothing_merges_to_nothing():
    assert merge_metrics([]) == {}


def test_flat_keys_are_the_name_or_name_and_suffix():
    flat = flatten(
        {
            "loss": Mean(1.0, 2.0),
            "tokens": Sum(7.0),
            "lr": Same(0.5),
            "reward/all": Distribution.of([1.0, 3.0]),
        }
    )
    assert flat == {
        "loss": 0.5,
        "tokens": 7.0,
        "lr": 0.5,
        "reward/all/mean": 2.0,
        "reward/all/std": 1.0,
        "reward/all/max": 3.0,
    }


def record(task, reward, tokens, status=Status.FINISHED, turns=1, outcomes=(), **parts):
    """A rollout of that many turns, and tokens in all of them."""
    turn = (PROMPT, [2] * (tokens // turns))
    rollout = a_rollout([turn] * turns, status=status, outcomes=list(outcomes))
    group = scored_group(rollout, rewards=[reward], name=task)
    group = replace(group, scored=(replace(group.scored[0], reward_parts=parts),))
    return annotate(group, AdvantageConfig(name="reward"))[0]


def test_rollouts_are_counted_for_all_tasks_and_for_each():
    samples = [
        record("sums", 1.5, 4, exact=1.0),
        record("sums", 0.5, 8, "truncated", exact=0.0),
        record("words", 1.0, 3),
    ]
    flat = flatten(rollout_metrics(samples))
    assert flat["reward/sums/mean"] == flat["reward/words/mean"] == flat["reward/all/mean"] == 1.0
    assert flat["reward/sums/max"] == 1.5
    assert flat["accuracy/sums/mean"] == 0.5
    assert flat["accuracy/all/mean"] == pytest.approx(2 / 3)
    assert flat["completion_tokens/all/mean"] == 5.0
    assert flat["completion_tokens/sums/max"] == 8.0
    assert flat["truncated/sums/mean"] == 0.5
    assert flat["reward_part/exact/sums/mean"] == flat["reward_part/exact/all/mean"] == 0.5
    assert {key.split("/")[-2] for key in flat} == {"all", "sums", "words"}


def test_tasks_with_turns_tell_of_them():
    samples = [
        record("sums", 1.0, 4),
        record("calc", 1.0, 6, turns=3, outcomes=["ok", "raised"]),
        record("calc", 0.0, 2, "turn_limit", turns=1),
    ]
    flat = flatten(rollout_metrics(samples, interactive={"calc"}))
    assert flat["turns/calc/mean"] == flat["turns/all/mean"] == 2.0
    assert flat["tool_calls/ok/calc/mean"] == 0.5
    assert flat["tool_calls/raised/calc/max"] == 1.0
    assert flat["tool_calls/unknown/calc/mean"] == 0.0
    assert flat["status/turn_limit/calc/mean"] == 0.5
    assert flat["status/finished/calc/mean"] == 0.5
    assert "turns/sums/mean" not in flat


def test_evaluations_name_tasks_only_if_there_are_several():
    one = [record("sums", 1.0, 4), record("sums", 0.0, 4)]
    assert evaluation_metrics(one) == {"eval/accuracy": 0.5, "eval/reward": 0.5, "eval/prompts": 2}
    two = evaluation_metrics([*one, record("words", 1.0, 4)])
    assert two["eval/accuracy"] == pytest.approx(2 / 3)
    assert two["eval/accuracy/sums"] == 0.5
    assert two["eval/reward/words"] == 1.0
    assert [two[f"eval/prompts{of}"] for of in ("", "/sums", "/words")] == [3, 2, 1]


def test_no_rollouts_give_no_metrics():
    assert rollout_metrics([]) == {}


def test_tokens_are_counted_for_all_tasks_and_for_each():
    ages = {"age": torch.tensor([1, 3, 8])}
    flat = flatten(by_task(ages, ["sums", "words", "none"], torch.tensor([0, 0, 1])))
    assert flat["age/all/mean"] == 4.0
    assert (flat["age/sums/mean"], flat["age/sums/std"], flat["age/sums/max"]) == (2.0, 1.0, 3.0)
    assert flat["age/words/max"] == 8.0
    assert "age/none/mean" not in flat


@given(
    tokens=st.lists(st.tuples(st.floats(-9, 9, width=32), st.integers(0, 4)), max_size=20),
    names=st.lists(st.sampled_from(["sums", "words"]), min_size=5, max_size=5),
)
def test_tasks_may_differ_from_rank_to_rank(tokens, names):
    """Whatever is dealt to which rank, merged it is what one rank would have measured."""

    def measured(part):
        values, sequences = [v for v, _ in part], [s for _, s in part]
        tasks = names if part else []
        return by_task(
            {"x": torch.tensor(values)}, tasks, torch.tensor(sequences, dtype=torch.int64)
        )

    whole = flatten(measured(tokens))
    own = [[t for t in tokens if names[t[1]] == name] for name in ("sums", "words")]
    merged = flatten(merge_metrics(map(measured, own)))
    assert merged == pytest.approx(whole, abs=1e-5)


def test_a_single_task_is_measured_once(monkeypatch):
    calls = []
    of = Distribution.of
    monkeypatch.setattr(Distribution, "of", lambda values: calls.append(1) or of(values))
    flat = flatten(by_task({"x": torch.ones(3)}, ["sums"] * 3, torch.tensor([0, 1, 2])))
    assert flat["x/all/mean"] == flat["x/sums/mean"] == 1.0
    assert len(calls) == 1


@dataclass
class Count:
    """A metric of a user's own."""

    count: int

    def merge(self, other):
        return Count(self.count + other.count)

    def values(self):
        return {"": float(self.count)}


class Plain:
    """A metric that is no dataclass."""


def test_numbers_are_fetched_as_they_are_and_all_together():
    """Each is what `item` would have given, also a float32 and a count; the rest stays."""
    values, plain = torch.tensor([0.1, -0.7, 1e-8]), Plain()
    first = {
        "loss": Mean(values.sum(), 3.0),
        "share": Mean((values > 0).sum(), 3.0),
        "entropy": Distribution.of(values),
        "rate": Same(0.25),
    }
    second = {"loss": Mean(torch.tensor([2.5], dtype=torch.bfloat16, requires_grad=True), 1.0)}
    reads: Counter[str] = Counter()
    with counting(reads):
        fetched = fetch_numbers([first, {}, second, {"count": Count(3), "plain": plain}])
    assert reads == {"core/metrics.py _read (tolist)": 1}
    assert fetched == [
        {
            "loss": Mean(values.sum().item(), 3.0),
            "share": Mean(2, 3.0),
            "entropy": Distribution.of(values.tolist()),
            "rate": Same(0.25),
        },
        {},
        {"loss": Mean(2.5, 1.0)},
        {"count": Count(3), "plain": plain},
    ]
    for metrics in fetched:
        for value in flatten({k: v for k, v in metrics.items() if k != "plain"}).values():
            assert type(value) is float


def test_tensors_merge_like_the_numbers_in_them():
    """Nobody has to fetch first: it only is slower."""
    parts = [torch.tensor([1.0, 5.0]), torch.tensor([3.0])]
    lazy = merge_metrics({"x": Distribution.of(p), "y": Mean(p.sum(), len(p))} for p in parts)
    exact = {"x": Distribution.of([1.0, 5.0, 3.0]), "y": Mean(9.0, 3.0)}
    assert flatten(lazy) == flatten(exact)
    assert all(type(value) is float for value in flatten(lazy).values())
