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
from torchtitan_rl.algorithms.advantage import check_advantage, group_advantages
from torchtitan_rl.algorithms.objective import objective
from torchtitan_rl.algorithms.policy_loss import LossInputs
from torchtitan_rl.cli.train import parse
from torchtitan_rl.config import AdvantageConfig, LossConfig, WarmStartConfig
from torchtitan_rl.core.columns import COLUMNS
from torchtitan_rl.core.types import Completion, Rollout, ScoredCompletion
from torchtitan_rl.observability.sinks import read_metrics
from torchtitan_rl.recipes import registry as recipes
from torchtitan_rl.run.launch import check
from torchtitan_rl.tasks.tools.tool import ArgumentsError

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


def test_the_advantage_of_ones_own_is_taken(tmp_path, monkeypatch):
    (tmp_path / "my_advantages.py").write_text(block("my_advantages.py"))
    monkeypatch.syspath_prepend(tmp_path)
    config = AdvantageConfig(name="my_advantages:above_best", kwargs={"margin": 0.1})
    check_advantage(config)
    said = Completion(0, 0, [1], "", [2])

    def advantages(*rewards: float) -> list[float]:
        group = [ScoredCompletion(said, reward, correct=False) for reward in rewards]
        return group_advantages(config, group, "group")

    assert advantages(1.0, 0.95, 0.2) == [1.0, 1.0, -1.0]
    assert advantages(1.0, 0.95) == [0.0, 0.0]
    assert advantages(0.3) == [0.0]


def test_a_recipe_builds_on_a_built_in_one_in_a_folder_of_its_own(tmp_path):
    """docs/recipes.md's example works without a clone, by a `config_registry` of one's own."""

    def list_recipes() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torchtitan_rl", "list"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    built_in = list_recipes().stdout
    assert [line.split()[0] for line in built_in.splitlines()] == list(RECIPES)
    (tmp_path / "config_registry.py").write_text(block("built_on.py"))
    lines = [line.split(maxsplit=1) for line in list_recipes().stdout.splitlines()]
    assert [name for name, _ in lines] == [*RECIPES, "three_numbers_tiny"]
    assert lines[-1][1] == "Sums of the digits of three numbers."
    made: dict = {}
    exec(block("built_on.py"), made)
    config = made["three_numbers_tiny"]()
    example = config.task.build(seed=0).train_example(0)
    assert len(example.messages[0]["content"].split()) == 3
    assert (config.generator.sampling.n, config.generator.sampling.max_tokens) == (8, 36)
    renamed = block("built_on.py").replace("three_numbers_tiny", "grpo_jsonl")
    (tmp_path / "config_registry.py").write_text(renamed)
    clash = list_recipes()
    assert clash.returncode == 2
    said = f"'grpo_jsonl' of {tmp_path / 'config_registry.py'} has the name of a built-in recipe"
    assert said in clash.stderr


def test_the_task_that_answers_can_be_played(tmp_path, monkeypatch):
    (tmp_path / "number_guessing.py").write_text(block("number_guessing.py"))
    monkeypatch.syspath_prepend(tmp_path)
    from number_guessing import NumberGuessing  # type: ignore[import-not-found]

    task = NumberGuessing.Config().build(seed=0)
    assert task.interactive
    example = task.train_example(1)
    secret, state = example.expected_answer, dict(example.state)
    heldout = {e.expected_answer for e in task.heldout_examples(200)}
    assert 5 < len(heldout) < 40
    assert secret not in heldout
    said = [str(secret + 1), str(secret - 1), "what?", str(secret)]
    answers = [task.answer([{"role": "assistant", "content": s}], state) for s in said]
    contents = [answer[0]["content"] for answer in answers[:3]]
    assert contents == ["lower", "higher", "a number, please"]
    assert (answers[3], state["right"]) == ([], True)
    turns = [Completion(0, 0, [1], s, [2]) for s in said]
    rollouts = [Rollout(turns, [], "finished", state), Rollout(turns[:1], [], "finished", {})]
    rewards = task.reward(rollouts, secret)
    assert [(r.value, r.correct) for r in rewards] == [(0.25, True), (0.0, False)]


def test_the_task_with_tools_can_be_played_and_its_recipe_used(tmp_path, monkeypatch):
    (tmp_path / "rooms.py").write_text(block("rooms.py"))
    monkeypatch.syspath_prepend(tmp_path)
    from rooms import PEOPLE, Rooms  # type: ignore[import-not-found]

    task = Rooms.Config().build(seed=0)
    example = task.train_example(3)
    person, state = example.messages[0]["content"], {}
    boss, room = task.tools["boss"], task.tools["room"]
    assert room.spec["function"]["parameters"]["required"] == ["person"]
    found = boss.function(**boss.arguments({"person": person}), state=state)
    assert found in PEOPLE
    assert room.function(person=found, state=state) == example.expected_answer
    assert state == {"lookups": 2}
    with pytest.raises(ArgumentsError, match="nobody is called zzz"):
        room.function(person="zzz", state=state)
    said = [Completion(0, 0, [1], text, [2]) for text in (example.expected_answer, "me")]
    rollouts = [Rollout([one], [], "finished", state) for one in said]
    assert task.reward(rollouts, example.expected_answer) == [1.0, 0.0]
    heldout = {e.messages[0]["content"] for e in task.heldout_examples(200)}
    assert 100 < len(heldout) < 200
    assert not heldout & {task.train_example(i).messages[0]["content"] for i in range(500)}
    made: dict = {}
    exec(block("rooms_recipe.py"), made)
    config = replace(
        made["rooms_tiny"](),
        run_name="rooms",
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
    joined = TEXT.replace("\\\n", "")
    found = [arguments.split() for arguments in dict.fromkeys(COMMAND.findall(joined))]
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
