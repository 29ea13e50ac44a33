"""Recipes: found in the working directory, listed, built; and what is said when that fails."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from torchtitan_rl.config import RunConfig
from torchtitan_rl.recipes.registry import (
    RecipeError,
    build_recipe,
    built_in_recipes,
    find_recipes,
    first_line,
    load_module,
    load_recipes,
)
from torchtitan_rl.run.launch import check

ROOT = Path(__file__).parents[2]

REGISTRY = '''
from dataclasses import dataclass
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.tasks.sum_digits import SumDigits
from torchtitan_rl.recipes.registry import build_recipe
from elsewhere import imported

def good() -> Controller.Config:
    """A recipe.

    With more to say."""
    return Controller.Config(model="m", task=SumDigits.Config(), seed=7)

def quoted() -> "Controller.Config":
    return Controller.Config(model="m", task=SumDigits.Config())

def raises() -> Controller.Config:
    return Controller.Config(model="m", task=SumDigits.Config(), steps=0)

def _private() -> Controller.Config:
    return good()

def untyped():
    return good()

def another_type() -> int:
    return 3

alias = imported
constant = 3
'''

ELSEWHERE = """
from torchtitan_rl.run.controller import Controller

def imported() -> Controller.Config: ...
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory, and imports as a process started in it would see them."""
    for name in ("config_registry", "elsewhere", "my_recipes"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path) != ROOT])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("config_registry", "elsewhere", "my_recipes"):
        sys.modules.pop(name, None)


@pytest.fixture
def registry(folder):
    (folder / "config_registry.py").write_text(REGISTRY)
    (folder / "elsewhere.py").write_text(ELSEWHERE)
    return load_module()


def test_the_module_is_the_one_in_the_working_directory(registry, folder):
    assert Path(registry.__file__) == folder / "config_registry.py"


def test_a_module_of_another_name_can_be_given(folder):
    (folder / "my_recipes.py").write_text("answer = 42")
    assert load_module("my_recipes").answer == 42


def test_a_module_can_be_given_as_a_file_and_import_its_neighbours(folder):
    (folder / "mine").mkdir()
    (folder / "mine" / "my_recipes.py").write_text("from elsewhere import answer")
    (folder / "mine" / "elsewhere.py").write_text("answer = 43")
    assert load_module("mine/my_recipes.py").answer == 43
    assert sys.path[:2] == [str(folder / "mine"), str(folder)]  # plug-ins are found in both


def test_a_file_whose_name_is_taken_is_not_mixed_up(folder):
    (folder / "random.py").write_text("answer = 42")
    with pytest.raises(RecipeError, match=r"'random' is also .*random.py; rename the file"):
        load_module("random.py")


def test_a_folder_without_recipes_has_the_built_in_ones(folder):
    assert load_module() is None
    assert load_recipes() == built_in_recipes()
    assert "grpo_sum_digits_tiny" in load_recipes()


def test_built_in_recipes_are_there_beside_ones_own(registry):
    assert load_recipes() == built_in_recipes() | find_recipes(registry)


def test_a_recipe_may_build_on_a_built_in_one_but_not_take_its_name(folder):
    source = """
from dataclasses import replace
from torchtitan_rl import recipes
from torchtitan_rl.config import RunConfig

def short() -> RunConfig:
    return replace(recipes.grpo_sum_digits_tiny(), steps=3)
"""
    (folder / "config_registry.py").write_text(source)
    assert build_recipe("short", load_recipes()).steps == 3
    (folder / "my_recipes.py").write_text(source.replace("short", "grpo_jsonl"))
    with pytest.raises(RecipeError, match=r"'grpo_jsonl' of .*my_recipes.py has the name of a b"):
        load_recipes("my_recipes")


def test_only_the_modules_own_public_recipes_are_listed(registry):
    assert list(find_recipes(registry)) == ["good", "quoted", "raises"]


def test_a_helper_with_a_type_that_does_not_resolve_does_not_hide_the_recipes(folder):
    # As written under `if TYPE_CHECKING`.
    helper = "\ndef helper(x: 'NotImported') -> int: ...\n"
    (folder / "config_registry.py").write_text(REGISTRY + helper)
    (folder / "elsewhere.py").write_text(ELSEWHERE)
    assert list(find_recipes(load_module())) == ["good", "quoted", "raises"]


def test_a_recipe_is_built_by_name(registry):
    assert build_recipe("good", find_recipes(registry)).seed == 7


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("goood", "unknown recipe 'goood'; did you mean 'good'"),
        ("xyz", "unknown recipe 'xyz'; Known: good, quoted, raises"),
        ("_private", "unknown recipe '_private'"),
        ("imported", "unknown recipe 'imported'"),
        ("raises", "recipe 'raises' does not build: steps must be positive; got 0"),
    ],
)
def test_a_recipe_that_cannot_be_built_says_why(registry, name, message):
    with pytest.raises(RecipeError, match=message):
        build_recipe(name, find_recipes(registry))


def test_the_first_line_of_a_recipes_description_is_shown(registry):
    found = find_recipes(registry)
    assert first_line(found["good"]) == "A recipe."
    assert first_line(found["quoted"]) == ""


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("my_recipes", "no my_recipes.py in .*give --module path/to/file.py or package.module"),
        ("elsewhere/my_recipes.py", "elsewhere/my_recipes.py: there is no such file"),
        ("nowhere.at_all", "no module 'nowhere.at_all'"),
        ("torchtitan_rl.nothing", "cannot import recipes from 'torchtitan_rl.nothing'"),
    ],
)
def test_a_missing_module_says_where_it_was_looked_for(folder, module, message):
    with pytest.raises(RecipeError, match=message):
        load_module(module)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(:", "SyntaxError"),
        ("1 / 0", "division by zero"),
        ("import no_such_module", "No module named 'no_such_module'"),
        (
            "from config_registry import grpo_jsonl",
            "built-in recipes are in torchtitan_rl.recipes: import them from there",
        ),
    ],
)
def test_a_broken_module_says_what_broke(folder, source, message):
    (folder / "config_registry.py").write_text(source)
    with pytest.raises(RecipeError, match=f"cannot import recipes from 'config_reg.*{message}"):
        load_module()


def test_every_built_in_recipe_builds_and_describes_itself(folder, monkeypatch):
    monkeypatch.chdir(ROOT)
    module, found = load_module(), load_recipes()
    assert module is not None
    for name, recipe in found.items():
        assert isinstance(build_recipe(name, found), RunConfig)
        assert first_line(recipe), name
        assert getattr(module, name) is recipe


@pytest.mark.parametrize(
    ("recipe", "heads", "layers"),
    [
        ("grpo_sum_digits_qwen3_0_6b", 16, 28),
        ("grpo_sum_digits_qwen3_1_7b", 16, 28),
        ("grpo_sum_digits_qwen3_14b", 40, 40),
    ],
)
def test_gpu_recipes_validate_against_their_models_without_a_gpu(
    folder, monkeypatch, tiny_model, recipe, heads, layers
):
    config = build_recipe(recipe, load_recipes())
    model = folder / config.model
    shutil.copytree(tiny_model, model)
    shape = json.loads((model / "config.json").read_text())
    shape |= {"num_attention_heads": heads, "num_key_value_heads": 8, "num_hidden_layers": layers}
    (model / "config.json").write_text(json.dumps(shape))
    monkeypatch.chdir(folder)
    check(replace(config, run_name="run"))
    too_many = replace(config.generator, tensor_parallel_degree=3)
    with pytest.raises(ValueError, match="generator tensor parallelism of 3 does not divide"):
        check(replace(config, run_name="run", generator=too_many))
