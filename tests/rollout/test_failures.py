"""What failed is told once in full, and counted from then on."""

import json

import pytest

from tests.support import ONE_TURN, graded_group
from torchtitan_rl.observability.run_folder import RunFolder
from torchtitan_rl.rollout.failures import Failures


@pytest.fixture
def failures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder("my-run", resume=False)
    folder.create({})
    return Failures(folder, ["low_tokens"])


def failed(number, reason="raised KeyError: 'total'", kind="failed"):
    group = graded_group(ONE_TURN, rewards=[1.0], number=number)
    group.fail(kind, f"reward of group {group.id} {reason}", 1)
    return group


def test_a_reason_is_said_in_full_once(failures, capsys):
    values = failures.of_step(0, [failed(1), failed(2), graded_group(ONE_TURN, rewards=[1.0])])
    assert values["rollouts/failed/all"] == 2
    assert capsys.readouterr().out == (
        "warning: 2 rollouts of 2 groups failed: reward of group low_tokens/train/1 raised "
        "KeyError: 'total'; all are in my-run/logs/failures.jsonl\n"
    )
    # Of another group: the same reason.
    assert failures.of_step(1, [failed(13)])["rollouts/failed/all"] == 1
    assert capsys.readouterr().out == ""
    failures.of_step(2, [failed(14), failed(15, "raised ZeroDivisionError")])
    said = capsys.readouterr().out
    assert said.startswith("warning: 2 rollouts of 2 groups failed: ")
    assert "train/15 raised ZeroDivisionError (and 1 other reason); all" in said
    failures.of_step(3, [failed(14), failed(15, "raised ZeroDivisionError")])
    assert capsys.readouterr().out == ""
    logged = (failures._folder.logs / "failures.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in logged] == [0, 0, 1, 2, 2, 3, 3]


def test_of_two_new_reasons_one_is_said_at_a_time(failures, capsys):
    groups = [failed(1), failed(2, "raised ZeroDivisionError")]
    for reason in ("KeyError: 'total' (and 1 other", "ZeroDivisionError (and 1 other"):
        failures.of_step(0, groups)
        said = capsys.readouterr().out
        assert said.count("\n") == 1
        assert reason in said
    failures.of_step(0, groups)
    assert capsys.readouterr().out == ""


def test_what_was_left_out_on_purpose_is_no_failure(failures, capsys):
    dropped = graded_group(ONE_TURN, rewards=[1.0])
    dropped.fail("dropped", "not useful", 1)
    failures.of_step(0, [dropped])
    assert capsys.readouterr().out == ""


def test_an_evaluation_says_how_many_prompts_it_lacks(failures, capsys):
    failures.of_step(0, [failed(1)])
    assert "1 rollout of group low_tokens/train/1 failed" in capsys.readouterr().out
    whole = [graded_group(ONE_TURN, rewards=[1.0]) for _ in range(10)]
    assert failures.of_evaluation(0, whole) == {}
    groups = [*whole, *(failed(i) for i in range(10))]
    assert failures.of_evaluation(0, groups) == {"rollouts/failed/evaluation": 10}
    # The reason is known, but that the numbers are of other prompts is not.
    assert "warning: 10 of 20 held-out prompts failed: reward of" in capsys.readouterr().out
    failures.of_evaluation(2, groups)
    assert capsys.readouterr().out == ""


def test_a_long_reason_is_one_line(failures, capsys):
    failures.of_step(0, [failed(1, "raised\n" + "word " * 1000)])
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert len(said) < 600
