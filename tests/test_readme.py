"""The README's examples, run as they stand."""

import ast
import asyncio
import inspect
import json
import math
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchtitan_rl import recipes, train
from torchtitan_rl.algorithms.objective import LossConfig, objective
from torchtitan_rl.algorithms.policy_loss import LossInputs
from torchtitan_rl.observability.sinks import read_metrics
from torchtitan_rl.types import Completion, Rollout
from torchtitan_rl.warm_start import WarmStartConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def block(first_line: str) -> str:
    """The python block that starts with a comment."""
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    [found] = [code for code in blocks if code.startswith(f"# {first_line}\n")]
    return found


def test_the_task_and_the_recipe_train_from_a_folder_of_their_own(tmp_path):
    for file in ("largest_digit.py", "config_registry.py"):
        (tmp_path / file).write_text(block(file))
    command = next(
        line for line in README.splitlines() if line.endswith("--config largest_digit_tiny")
    )
    arguments = [*command.split()[1:], "--steps", "15"]  # of 40: enough to see it learn
    run = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stdout + run.stderr
    [folder] = tmp_path.glob("outputs/largest_digit_tiny-*")
    rows = read_metrics(folder / "metrics.jsonl")
    assert rows[-1]["eval/accuracy"] > rows[0]["eval/accuracy"] + 0.2
    assert (folder / "model" / "model.safetensors").is_file()


def test_the_file_of_questions_trains(tmp_path, tiny_model):
    subprocess.run([sys.executable, "-c", block("sums.py")], cwd=tmp_path, check=True)
    command = next(line for line in README.splitlines() if "--task.path sums.jsonl" in line)
    # A random model hits a number now and then.
    small = f"""--model {tiny_model} --steps 2 --task.reward.format_reward 0.1
        --generator.sampling.max_tokens 16 --generator.engine.kv_cache_gib 0.1
        --evaluation.prompts 20 --run_name questions"""
    run = subprocess.run(
        [sys.executable, *shlex.split(command)[1:], *small.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    rows = read_metrics(tmp_path / "outputs/questions/metrics.jsonl")
    assert 0 < rows[0]["reward/jsonl/mean"] < 1
    config = json.loads((tmp_path / "outputs/questions/config.json").read_text())
    assert config["task"]["path"] == str(tmp_path / "sums.jsonl")


def test_the_loss_of_ones_own_is_taken(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(block("my_losses.py"))
    monkeypatch.syspath_prepend(tmp_path)
    config = LossConfig(name="my_losses:awr", kwargs={"beta": 0.5})
    inputs = LossInputs(
        logprobs=torch.tensor([-1.0, -2.0], requires_grad=True),
        old_logprobs=torch.tensor([-1.0, -2.0]),
        advantages=torch.tensor([0.0, 0.5]),
        weights=torch.ones(2),
        sequence_ids=torch.tensor([0, 1]),
    )
    assert objective(config, inputs).loss_sum.item() == pytest.approx(1 + 2 * math.e)


def test_the_task_with_a_tool_can_be_played(tmp_path, monkeypatch):
    (tmp_path / "guessing.py").write_text(block("guessing.py"))
    monkeypatch.syspath_prepend(tmp_path)
    from guessing import Guessing  # type: ignore[import-not-found]

    task = Guessing.Config().build(seed=0)
    example = task.train_example(3)
    state = dict(example.state)
    guess = task.tools["guess"]
    assert guess.spec["function"]["parameters"]["required"] == ["number"]
    assert guess.function(**guess.arguments({"number": "99999"}), state=state) == "lower"
    assert guess.function(number=example.expected_answer, state=state) == "right"
    said = Completion(0, 0, [1], str(example.expected_answer), [2], None, "stop")
    [reward] = task.reward([Rollout([said], [], "finished", state)], example.expected_answer)
    assert (reward.value, reward.correct) == (0.5, True)
    config = replace(
        recipes.build_recipe("echo_calculator_tiny", recipes.load_module()),
        task=Guessing.Config(show_tools=False),
        run_name="guessing",
        output_dir=str(tmp_path),
        warm_start=WarmStartConfig(cache_dir=str(tmp_path)),
    )
    train.check(config)  # the demonstration too


def test_the_mixture_can_be_made(monkeypatch):
    made: dict = {}
    exec(block("mixing.py"), made)
    assert list(made["task"].build(seed=0).members()) == ["calculator", "sum_digits"]


@pytest.mark.parametrize(
    "command",
    re.findall(
        r"torchtitan_rl\.train (--config (?:grpo|echo)(?!.*--help).*)$", README, re.MULTILINE
    ),
)
def test_the_commands_are_understood(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert train.parse(shlex.split(command)) is not None


async def test_the_notebook_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = compile(block("notebook"), "README", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, {})
    assert inspect.isawaitable(result)
    await asyncio.wait_for(result, 120)
    assert len(ast.literal_eval(capsys.readouterr().out.strip().splitlines()[-1])) == 4


def test_every_path_and_make_target_named_exists():
    for path in re.findall(r"\]\(([a-zA-Z_/.]+)\)|`(torchtitan_rl/[a-z_/.]+)`", README):
        assert (ROOT / next(filter(None, path))).exists(), path
    targets = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z]+)`?\b", README)) - {"a"} <= targets


@pytest.mark.parametrize("recipe", re.findall(r"--config ((?:grpo|echo)\w+)", README))
def test_the_recipes_named_exist(recipe):
    assert f"def {recipe}()" in (ROOT / "config_registry.py").read_text()
