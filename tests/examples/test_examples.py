"""The examples, run as their docstrings say: short, from a random tiny model."""

import ast
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
import torch

from tests.support import ONE_THREAD
from torchtitan_rl.algorithms.policy_loss import LossInputs
from torchtitan_rl.cli.train import parse
from torchtitan_rl.core.types import Completion, Rollout
from torchtitan_rl.observability.json_lines import read_lines
from torchtitan_rl.observability.sinks import read_metrics

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "actors.ipynb"
IMITATION_STEPS = 150
"""Supervised steps that the notebook takes before its RL step."""
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
PARTS = ("task", "advantage", "loss", "generator")


def command(script: Path) -> list[str]:
    """Arguments for `python` that run the command in a script's docstring."""
    docstring = ast.get_docstring(ast.parse(script.read_text())) or ""
    [line] = [line for line in docstring.splitlines() if line.startswith("torchtitan-rl train ")]
    return ["-m", "torchtitan_rl", *shlex.split(line)[1:]]


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory) -> tuple[list[dict[str, float]], list[dict]]:
    """Two steps with all that the commands ask for: what was measured, and the rollouts of the
    first."""
    folder = tmp_path_factory.mktemp("outputs")
    task, *others = [command(EXAMPLES / f"custom_{part}.py") for part in PARTS]
    short = f"""--model {tiny_model} --steps 2 --prompts_per_step 4 --evaluation.prompts 4
        --generator.engine.kv_cache_gib 0.1 --output_dir {folder} --run_name run"""
    options = [option for other in others for option in other[len(task) :]]
    assert [other[: len(task)] for other in others] == [task] * 3
    done = subprocess.run(
        [sys.executable, *task, *options, *short.split(), *ONE_THREAD],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(folder / "run/metrics.jsonl")
    # Both steps have trained, on what the weights of that step have sampled.
    assert [row["mismatch/all/max"] < 1e-4 for row in rows[:2]] == [True, True]
    lines = read_lines(folder / "run/rollouts/step-000000.jsonl")
    return rows, [rollout for _, rollout in lines]


@pytest.mark.parametrize("part", PARTS)
def test_each_command_is_understood(part, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert parse(command(EXAMPLES / f"custom_{part}.py")[3:]) is not None


def test_the_task_is_trained_on(trained):
    rows, rollouts = trained
    assert 0 < rows[0]["reward/palindromes/mean"] < 1
    for rollout in rollouts:
        text = rollout["messages"][-1]["content"]
        assert len(rollout["expected_answer"]) == 3
        assert rollout["correct"] == (rollout["reward"] >= 1)
        if "\ufffd" not in text:  # half a character: the log's text may be another
            assert rollout["reward"] % 1 == pytest.approx(0.1 * (text[:1] == text[-1:]))


def test_the_tasks_reward(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from custom_task import Palindromes

    texts = ["abccba", "abcba", "abcabc", "abcbca", "xyyx", "abc", "a", ""]
    said = [Completion(0, 0, [1], text, [2]) for text in texts]
    task = Palindromes.Config().build(seed=0)
    rewards = task.reward([Rollout([c], [], "finished") for c in said], "abc")
    assert rewards == pytest.approx([1.1, 1.1, 0, 0.1, 0.1, 0, 0.1, 0.1])
    example = task.train_example(0)
    assert example.expected_answer == example.messages[-1]["content"]


def test_the_advantage_is_taken(trained):
    _, rollouts = trained
    advantages = []
    for _, group in groupby(rollouts, key=lambda rollout: rollout["group"]):
        samples = list(group)
        rewards = [sample["reward"] for sample in samples]
        for sample in samples:
            beaten = sum(sample["reward"] > reward for reward in rewards)
            beating = sum(sample["reward"] < reward for reward in rewards)
            advantages.append(sample["advantage"])
            assert sample["advantage"] == pytest.approx(0.5 * (beaten - beating) / 7)
    assert len(advantages) == 32
    assert any(advantages)


def test_the_loss_is_taken(trained):
    rows, _ = trained
    # On-policy the ratio is 1, up to rounding and the limit that the command sets.
    for row in rows[:2]:
        assert row["loss/taper/mean"] == pytest.approx(1, abs=1e-4)
        assert row["loss/taper/max"] <= 1


@pytest.mark.parametrize(("moved", "weight"), [(-1.0, math.exp(-1)), (0.0, 1.0), (1.0, 1.0)])
def test_the_loss_lets_go_of_what_has_become_unlikely(monkeypatch, moved, weight):
    monkeypatch.syspath_prepend(EXAMPLES)
    from custom_loss import tapered

    logprobs = torch.full((2,), -2.0 + moved, requires_grad=True)
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=logprobs.detach(),
        advantages=torch.tensor([1.0, -1.0]),
        weights=torch.ones(2),
        sequence_ids=torch.tensor([0, 1]),
        generator_logprobs=torch.full((2,), -2.0),
    )
    tapered(inputs).loss_sum.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1.0, weight])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_fits_on_a_screen_and_says_how_to_run_it(script):
    most = 60 if script.stem == "custom_generator" else 40
    assert len(script.read_text().splitlines()) < most
    assert command(script)[3] == "--module"


def test_the_notebook_trains_a_step_that_does_what_it_says(tmp_path):
    wanted = (
        *("version", "handle.version", "handle.changed_bytes", "advantages", "times"),
        *("before", "metrics['mismatch/all/max']"),
    )
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("run_notebook.py"), NOTEBOOK, *wanted],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "Agg"},
        # Its actors have a thread for each core: here one, because two test processes share the
        # cores.
        preexec_fn=lambda: os.sched_setaffinity(0, {max(os.sched_getaffinity(0))}),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    version, published, changed, advantages, times, before, mismatch = json.loads(lines[-1])
    assert version == published == IMITATION_STEPS + 1
    assert changed > 0
    assert mismatch < 1e-4  # the step was taken on what its own weights have sampled
    assert all(map(math.isfinite, before))
    check_claim(advantages, times)
    assert check_printed(lines[:-1]) == len(advantages)


def check_claim(advantages: list[float], times: list[float]) -> None:
    """Most samples that were better than their group have become likelier, most of the others less
    likely, and so have their means. Which samples there are depends on the CPU's rounding."""
    rows = sorted(zip(advantages, times, strict=True), key=lambda row: -row[0])
    better = [factor for advantage, factor in rows if advantage > 0]
    worse = [factor for advantage, factor in rows if advantage < 0]
    assert sum(factor > 1 for factor in better) > 0.5 * len(better)
    assert sum(factor < 1 for factor in worse) > 0.5 * len(worse)
    assert statistics.mean(map(math.log, better)) > 0 > statistics.mean(map(math.log, worse))


def check_printed(lines: list[str]) -> int:
    """What the cells print agrees with itself; returns how many samples were trained on."""
    text = "\n".join(lines)
    ranked = re.findall(r"^([+-]\d\.\d\d) +(\d+\.\d\d) times as likely", text, re.MULTILINE)
    assert len(ranked) == 16
    [(likelier, better)] = re.findall(r"(\d+) of (\d+) became likelier", text)
    [(_, worse)] = re.findall(r"(\d+) of (\d+) became less likely", text)
    assert int(likelier) > 0.5 * int(better)
    [trained] = re.findall(r"(\d+) are in groups that teach", text)
    assert int(better) + int(worse) == int(trained)
    return int(trained)


def test_the_notebook_is_stored_as_it_was_executed():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    kinds = [cell["cell_type"] for cell in cells]
    assert kinds == ["markdown", "code"] * (len(cells) // 2)  # a word before every cell
    code = cells[1::2]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}  # no noise
    printed = "".join(line for output in outputs for line in output.get("text", []))
    check_printed(printed.splitlines())
    [picture] = [output["data"]["image/png"] for output in outputs if "data" in output]
    assert len(picture) < 100_000
    for cell in code:
        assert bool(cell["outputs"]) == ("print(" in "".join(cell["source"]))
        assert len(cell["source"]) <= 25
    assert "/home/" not in NOTEBOOK.read_text()
    assert "/root/" not in NOTEBOOK.read_text()
