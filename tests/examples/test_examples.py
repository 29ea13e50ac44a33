"""The examples, run as their docstrings say: short, from a random tiny model."""

import ast
import json
import math
import shlex
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


def test_the_notebook_trains_a_step_and_serves_it(tmp_path):
    wanted = (
        *("taught_version", "version", "changed_bytes", "[c.policy_version for c in again]"),
        *("[c.token_logprobs for c in completions]", "[c.token_logprobs for c in again]"),
        *("now", "renewed", "[e.advantage for e in episodes]"),
    )
    shorter = {
        "range(120)": "range(60)",  # of teaching: enough for rewards that differ
        "kv_cache_gib=0.1))": "kv_cache_gib=0.1), threads=1)",
        "Config(optimizer=": "Config(threads=1, optimizer=",
    }
    written = NOTEBOOK.read_text()
    for text, other in shorter.items():
        assert written.count(text) == 1
        written = written.replace(text, other)
    notebook = tmp_path / NOTEBOOK.name
    notebook.write_text(written)
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("run_notebook.py"), notebook, *wanted],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    taught, version, changed, versions, before, after, now, renewed, advantages = json.loads(
        lines[-1]
    )
    assert version == taught + 1
    assert set(versions) == {version}
    assert changed > 0
    # The generator serves what the trainer has, and that is not what it was.
    assert farthest(after, renewed) < 1e-4
    assert farthest(before, now) > 1e-2
    # A step goes where the advantages point.
    moved = [sum(new) - sum(old) for new, old in zip(now, before, strict=True)]
    assert sum(a * m for a, m in zip(advantages, moved, strict=True)) > 0
    assert sum("█" in line or "▐" in line or "▌" in line for line in lines) >= 8  # the plot


def farthest(some: list[list[float]], others: list[list[float]]) -> float:
    """The largest difference of two logprobs of the same token."""
    return max(
        abs(a - b)
        for left, right in zip(some, others, strict=True)
        for a, b in zip(left, right, strict=True)
    )


def test_the_notebook_is_stored_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    kinds = [cell["cell_type"] for cell in cells]
    assert kinds == ["markdown", "code"] * (len(cells) // 2)  # a word before every cell
    for cell in cells[1::2]:
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
        assert len(cell["source"]) <= 25
        assert not any("/home/" in line or '"/' in line for line in cell["source"])
