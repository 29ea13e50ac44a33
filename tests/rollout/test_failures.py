"""What failed is told once in full, and counted from then on."""

import json

import pytest

from tests.support import ONE_TURN, a_rollout, scored_group
from torchtitan_rl.config import AdvantageConfig
from torchtitan_rl.core.types import Status
from torchtitan_rl.observability.run_folder import RunFolder
from torchtitan_rl.rollout.episodes import annotate
from torchtitan_rl.rollout.failures import FailureReporter, failures_of
from torchtitan_rl.rollout.metrics import failure_metrics


@pytest.fixture
def failures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder("my-run", resume=False)
    folder.create({})
    return FailureReporter(folder)


def records(*rollouts, lost=(), number=0):
    group = scored_group(*rollouts, rewards=[1.0] * len(rollouts), lost=lost, number=number)
    return annotate(group, AdvantageConfig(name="mean_baseline"))


def failed(number, reason="raised KeyError: 'total'"):
    """A group of one rollout, which was lost."""
    reason = f"reward of group low_tokens/train/{number} {reason}"
    lost = a_rollout(ONE_TURN).failed(Status.FAILED, reason)
    return records(lost=[lost], number=number)


EMPTY = a_rollout([], sample=3).failed(Status.EMPTY, "nothing was sampled")
THREE = [a_rollout(ONE_TURN, sample=number) for number in range(3)]


@pytest.mark.parametrize(
    ("group", "counts", "partial"),
    [
        (records(*THREE, lost=[EMPTY]), {"empty": 1}, True),
        (
            records(lost=[*(r.failed(Status.FAILED, "it raised") for r in THREE), EMPTY]),
            {"failed": 3, "empty": 1},
            False,
        ),
        (
            [record.discarded("not useful") for record in records(*THREE, lost=[EMPTY])],
            {"not_useful": 3, "empty": 1},
            True,
        ),
        (
            records(lost=[r.failed(Status.TIMED_OUT, "too slow") for r in THREE]),
            {"timed_out": 3},
            False,
        ),
    ],
    ids=["a sample", "a sample, then the reward", "a sample, then not useful", "timed out"],
)
def test_every_rollout_of_a_group_is_accounted_for_once(group, counts, partial):
    failures = failures_of(group)
    assert {failure.kind: failure.rollouts for failure in failures} == counts
    metrics = failure_metrics(failures, ["low_tokens"])
    assert metrics["groups/partial/all"] == partial
    assert metrics["groups/failed/all"] == (not partial)
    assert all(metrics[f"rollouts/{kind}/low_tokens"] == counts[kind] for kind in counts)


def test_a_reason_is_said_in_full_once(failures, capsys):
    found = failures.of_step(0, [*failed(1), *failed(2), *records(*THREE)])
    assert [failure.rollouts for failure in found] == [1, 1]
    assert capsys.readouterr().out == (
        "warning: 2 rollouts of 2 groups failed: reward of group low_tokens/train/1 raised "
        "KeyError: 'total'; all are in my-run/logs/failures.jsonl\n"
    )
    # Of another group: the same reason.
    assert len(failures.of_step(1, failed(13))) == 1
    assert capsys.readouterr().out == ""
    failures.of_step(2, [*failed(14), *failed(15, "raised ZeroDivisionError")])
    said = capsys.readouterr().out
    assert said.startswith("warning: 2 rollouts of 2 groups failed: ")
    assert "train/15 raised ZeroDivisionError (and 1 other reason); all" in said
    failures.of_step(3, [*failed(14), *failed(15, "raised ZeroDivisionError")])
    assert capsys.readouterr().out == ""
    logged = (failures._folder.logs / "failures.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in logged] == [0, 0, 1, 2, 2, 3, 3]


def test_of_two_new_reasons_one_is_said_at_a_time(failures, capsys):
    groups = [*failed(1), *failed(2, "raised ZeroDivisionError")]
    for reason in ("KeyError: 'total' (and 1 other", "ZeroDivisionError (and 1 other"):
        failures.of_step(0, groups)
        said = capsys.readouterr().out
        assert said.count("\n") == 1
        assert reason in said
    failures.of_step(0, groups)
    assert capsys.readouterr().out == ""


def test_what_was_left_out_on_purpose_is_no_failure(failures, capsys):
    failures.of_step(0, [record.discarded("not useful") for record in records(*THREE)])
    assert capsys.readouterr().out == ""


def test_an_evaluation_says_how_many_prompts_it_lacks(failures, capsys):
    failures.of_step(0, failed(1))
    assert "1 rollout of group low_tokens/train/1 failed" in capsys.readouterr().out
    whole = [record for i in range(20, 30) for record in records(THREE[0], number=i)]
    assert failures.of_evaluation(0, whole) == {}
    groups = [*whole, *(record for i in range(10) for record in failed(i))]
    assert failures.of_evaluation(0, groups) == {"rollouts/failed/evaluation": 10}
    # The reason is known, but that the numbers are of other prompts is not.
    assert "warning: 10 of 20 held-out prompts failed: reward of" in capsys.readouterr().out
    failures.of_evaluation(2, groups)
    assert capsys.readouterr().out == ""


def test_a_long_reason_is_one_line(failures, capsys):
    failures.of_step(0, failed(1, "raised\n" + "word " * 1000))
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert len(said) < 600
