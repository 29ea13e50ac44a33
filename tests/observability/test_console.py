"""What a person reads: the line of a step, and the summary at the end."""

import json

import pytest

from torchtitan_rl.observability.console import StepProgress, print_summary, step_line
from torchtitan_rl.observability.run_folder import RunFolder

TRAINED = {
    "reward/all/mean": 0.7134,
    "accuracy/all/mean": 0.6249,
    "tokens_per_second": 5211.4,
    "time/generate": 0.911,
    "time/grade": 0.004,
    "time/train": 0.452,
    "time/sync": 0.018,
}


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            TRAINED,
            "step   12  reward 0.713  accuracy  62%   5211 tok/s  "
            "generate 0.91 s  grade 0.00 s  train 0.45 s  sync 0.02 s",
        ),
        (
            TRAINED | {"eval/accuracy": 0.415},
            "step   12  reward 0.713  accuracy  62%   5211 tok/s  "
            "generate 0.91 s  grade 0.00 s  train 0.45 s  sync 0.02 s  │ held-out accuracy 41.5%",
        ),
        ({"eval/accuracy": 1.0}, "step   12  │ held-out accuracy 100.0%"),
        (
            {"overlong/truncated": 198, "overlong/dropped": 0},
            "step   12  │ 198 overlong episodes truncated",
        ),
        (
            {"groups/failed/all": 2.0, "groups/partial/all": 1.0},
            "step   12  │ 2 groups failed  │ 1 group lost samples",
        ),
        (
            {"eval/accuracy": 0.5, "eval/prompts": 10, "rollouts/failed/evaluation": 2},
            "step   12  │ held-out accuracy 50.0%  of 10 of 12 prompts",
        ),
        ({"eval/accuracy": 0.5, "eval/prompts": 12}, "step   12  │ held-out accuracy 50.0%"),
        ({}, "step   12"),
    ],
    ids=[
        *("trained", "trained and evaluated", "evaluated", "overlong", "failed groups"),
        *("failed prompts", "all prompts", "nothing"),
    ],
)
def test_step_line(values, line):
    assert step_line(12, values) == line


def test_progress_prints_its_lines_as_they_are(capsys):
    with StepProgress("training", total=3) as progress:
        progress.advance("step 1 [bold]not markup[/bold]")
        progress.advance()
    assert "step 1 [bold]not markup[/bold]" in capsys.readouterr().out


def summary(tmp_path, rows, capsys):
    folder = RunFolder(tmp_path / "my-run", resume=False)
    folder.create({})
    folder.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print_summary(folder)
    return capsys.readouterr().out


def test_the_summary_compares_the_first_evaluation_with_the_last(tmp_path, capsys):
    printed = summary(
        tmp_path,
        [
            {"step": 0, "eval/accuracy": 0.4, "eval/reward": 0.51, "loss": 1.0},
            {"step": 1, "loss": 0.9},
            {"step": 2, "eval/accuracy": 0.1, "eval/reward": 0.0},
            {"step": 3, "eval/accuracy": 0.655, "eval/reward": 0.75},
        ],
        capsys,
    )
    table = [line for line in printed.splitlines() if "accuracy" in line or "reward" in line]
    assert [[cell.strip() for cell in line.split("│")[1:-1]] for line in table] == [
        ["accuracy", "40.0%", "65.5%", "+25.5 points"],
        ["reward", "0.510", "0.750", "+0.240"],
    ]


def test_the_summary_tells_a_change_from_chance(tmp_path, capsys):
    before = {"eval/accuracy": 0.415, "eval/reward": 0.5, "eval/prompts": 200}
    after = {"eval/accuracy": 0.845, "eval/reward": 0.9, "eval/prompts": 200}
    tasks = {"eval/accuracy/sums": 0.5, "eval/prompts/sums": 40}
    rows = [{"step": 0} | before | tasks, {"step": 1} | after | tasks]
    printed = summary(tmp_path, rows, capsys)
    table = [line.split("│")[1:-1] for line in printed.splitlines() if "%" in line]
    assert [[cell.strip() for cell in line] for line in table if line] == [
        ["accuracy", "41.5% (35–48)", "84.5% (79–89)", "+43.0 points (+34 to +51)"],
        ["accuracy/sums", "50.0% (35–65)", "50.0% (35–65)", "+0.0 points (-21 to +21)"],
    ]
    assert "in brackets: 95 % intervals" in printed
    assert "prompts/sums" not in printed


@pytest.mark.parametrize(
    ("before", "after", "row"),
    [
        ({"eval/prompts": 20}, {"eval/prompts": 20}, None),
        (
            {"eval/prompts": 20},
            {"eval/prompts": 30},
            ["of prompts", "20 of 20", "30 of 30", "not the same"],
        ),
        (
            {"eval/prompts": 20},
            {"eval/prompts": 12, "rollouts/failed/evaluation": 8},
            ["of prompts", "20 of 20", "12 of 20", "not the same"],
        ),
        (
            {"eval/prompts": 12, "rollouts/failed/evaluation": 8},
            {"eval/prompts": 12, "rollouts/failed/evaluation": 8},
            ["of prompts", "12 of 20", "12 of 20", ""],
        ),
        (
            {},
            {"eval/prompts": 12, "rollouts/failed/evaluation": 8},
            ["of prompts", "?", "12 of 20", "not the same"],
        ),
    ],
)
def test_the_summary_says_of_how_many_prompts_it_is(tmp_path, capsys, before, after, row):
    rows = [{"step": i, "eval/accuracy": 0.4} | values for i, values in enumerate((before, after))]
    printed = summary(tmp_path, rows, capsys)
    assert ("greedy, on 20 held-out prompts" in printed) == (row is None)
    lines = [line.split("│")[1:-1] for line in printed.splitlines()]
    table = [[cell.strip() for cell in line] for line in lines if line]
    assert [line for line in table if "prompts" in line[0]] == ([row] if row else [])


def test_the_summary_says_where_everything_is(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = ("tensorboard", "rollouts", "checkpoints", "model")
    for folder in folders:
        (tmp_path / "my-run" / folder).mkdir(parents=True)
    printed = summary(tmp_path, [{"step": 0, "eval/accuracy": 0.4}], capsys)
    for what in ("metrics.jsonl", *folders):
        assert f" my-run/{what}\n" in printed
    bare = summary(tmp_path / "bare", [{"step": 0, "eval/accuracy": 0.4}], capsys)
    assert "rollouts" not in bare


@pytest.mark.parametrize(
    ("installed", "activated", "command"),
    [
        (False, False, "bin/python -m torchtitan_rl.view my-run"),
        (True, False, "bin/torchtitan-rl view my-run"),
        (True, True, "torchtitan-rl view my-run"),
    ],
)
def test_the_summary_says_how_to_look_at_the_run(
    tmp_path, capsys, monkeypatch, installed, activated, command
):
    monkeypatch.chdir(tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    if installed:
        (programs / "torchtitan-rl").touch(mode=0o755)
    monkeypatch.setattr("sys.executable", str(programs / "python"))
    monkeypatch.setenv("PATH", str(programs) if activated else "")
    assert f"look at it   {command}\n" in summary(tmp_path, [], capsys)


def test_a_step_line_tells_of_tool_calls_that_failed():
    values = {"reward/all/mean": 0.5, "accuracy/all/mean": 0.5, "tokens_per_second": 10.0}
    values |= {f"time/{phase}": 0.1 for phase in ("generate", "grade", "train", "sync")}
    assert "tool calls" not in step_line(1, values)
    values |= {"tool_calls/ok/all/mean": 1.5, "tool_calls/raised/all/mean": 0.5}
    assert "25% of tool calls failed" in step_line(1, values)
    values |= {"tool_calls/malformed/all/mean": 1.0, "tool_calls/unknown/all/mean": 1.0}
    assert "50% of tool calls wrong  12% of tool calls failed" in step_line(1, values)
    values |= {"tool_calls/malformed/all/mean": 0.0, "tool_calls/unknown/all/mean": 0.0}
    values |= {"tool_calls/raised/all/mean": 0.0, "echo_nll/mean": 1.25}
    assert "tool calls" not in step_line(1, values)
    assert "echo 1.25  " in step_line(1, values)
    drowned = {**values, "grad_share/echo": 0.891}
    assert "echo 1.25 (89% of the gradient)  " in step_line(1, drowned)
