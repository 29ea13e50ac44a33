"""The examples of the README and of docs/, run as they stand."""

import ast
import asyncio
import json
import math
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.pages import BLOCKS, PAGES, ROOT, TEXT, block, command, run_block
from tests.support import ONE_THREAD
from torchtitan_rl.algorithms.objective import objective
from torchtitan_rl.algorithms.policy_loss import LossInputs
from torchtitan_rl.cli.train import parse
from torchtitan_rl.config import LossConfig, WarmStartConfig
from torchtitan_rl.core.columns import COLUMNS
from torchtitan_rl.core.types import Completion, Rollout
from torchtitan_rl.observability.sinks import read_metrics
from torchtitan_rl.recipes import registry as recipes
from torchtitan_rl.run.launch import check

RECIPES = recipes.built_in_recipes()


def test_the_task_and_the_recipe_train_from_a_folder_of_their_own(tmp_path):
    for file in ("largest_digit.py", "config_registry.py"):
        (tmp_path / file).write_text(block(file))
    # Of 150 steps of imitation, and then 40: enough to see it learn.
    arguments = [*command("--config largest_digit_tiny"), "--warm_start.steps", "80"]
    arguments += ["--steps", "12", "--evaluation.prompts", "100", *ONE_THREAD]
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
    # A random model hits a number now and then.
    small = f"""--model {tiny_model} --steps 2 --task.reward.format_reward 0.1
        --generator.sampling.max_tokens 16 --generator.engine.kv_cache_gib 0.1
        --evaluation.prompts 20 --run_name questions {" ".join(ONE_THREAD)}"""
    run = subprocess.run(
        [sys.executable, *command("--task.path sums.jsonl"), *small.split()],
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
    said = Completion(0, 0, [1], str(example.expected_answer), [2])
    [reward] = task.reward([Rollout([said], [], "finished", state)], example.expected_answer)
    assert (reward.value, reward.correct) == (0.5, True)
    config = replace(
        recipes.build_recipe("echo_calculator_tiny", RECIPES),
        task=Guessing.Config(show_tools=False),
        run_name="guessing",
        output_dir=str(tmp_path),
        warm_start=WarmStartConfig(cache_dir=str(tmp_path)),
    )
    check(config)  # the demonstration too


def test_the_column_is_declared():
    exec(block("surprises.py"), {})
    surprise = COLUMNS.pop("surprise")
    assert (surprise.made_by, surprise.covers) == ("generator", "completion")


def test_the_mixture_can_be_made(monkeypatch):
    made: dict = {}
    exec(block("mixing.py"), made)
    assert list(made["task"].build(seed=0).members()) == ["calculator", "sum_digits"]


COMMAND = re.compile(r"^(?:python -m torchtitan_rl\.|torchtitan-rl )train (--config .*)$", re.M)


def overridden() -> list[str]:
    """Arguments of commands that change something in a recipe of this repository."""
    found = [arguments.split() for arguments in dict.fromkeys(COMMAND.findall(TEXT))]
    mine = [a for a in found if a[1] in RECIPES and a[2:] and "--help" not in a]
    return [" ".join(arguments) for arguments in mine]


@pytest.mark.parametrize("arguments", overridden())
def test_the_commands_are_understood(arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert parse(shlex.split(arguments)) is not None


async def test_the_notebook_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    await asyncio.wait_for(run_block("notebook"), 120)
    assert len(ast.literal_eval(capsys.readouterr().out.strip().splitlines()[-1])) == 4


def test_every_python_block_is_used_by_a_test():
    tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    users = "".join(text for text in tests if "from tests.pages import" in text)
    for code in BLOCKS:
        name = code.partition("\n")[0].removeprefix("# ")
        assert code.startswith("# "), f"name this block in a comment, and test it:\n{code}"
        assert f'"{name}"' in users, f"no test uses the block {name}"


def test_every_path_and_make_target_named_exists():
    """Links of docs/ are Sphinx's business: see test_docs.py."""
    paths = re.findall(r"\]\(([a-zA-Z_/.]+)\)", PAGES["README.md"])
    folders = "torchtitan_rl|examples|scripts|requirements|tests|benchmarks"
    paths += re.findall(rf"`((?:{folders})/[a-z0-9_/.]*)`", TEXT)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    targets = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", TEXT, re.MULTILINE)) <= targets


def test_the_names_that_are_said_to_be_in_a_file_are_there():
    """Written as `path.py`: `NAME`, `other`."""
    said = re.findall(r"`(torchtitan_rl/[a-z0-9_/]*\.py)`: (`\w+`(?:, `\w+`)*)", TEXT)
    pairs = [(path, name) for path, names in said for name in re.findall(r"\w+", names)]
    assert len(pairs) > 20
    defined = r"^ *(?:class |def |async def )?{}\b *(?:=|:|\()"
    missing = [
        (path, name)
        for path, name in pairs
        if not re.search(defined.format(name), (ROOT / path).read_text(), re.MULTILINE)
    ]
    assert missing == []


def test_the_readme_is_short():
    assert len(PAGES["README.md"].splitlines()) < 160


def test_the_recipes_named_exist():
    """In this repository, or in a block of a page."""
    known = RECIPES.keys() | set(re.findall(r"^def (\w+)\(\) -> RunConfig", TEXT, re.M))
    assert set(re.findall(r"--config (\w+)", TEXT)) <= known
