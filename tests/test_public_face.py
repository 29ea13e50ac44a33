"""`import torchtitan_rl`: its names, without torch and without side effects."""

import ast
import builtins
import inspect
import subprocess
import sys
from pathlib import Path

import torchtitan_rl
from tests.cli.test_main import imported
from torchtitan_rl.core.errors import TorchtitanRLError

PACKAGE = Path(torchtitan_rl.__file__).parent


def test_every_public_name_is_there_and_type_checkers_know_it():
    tree = ast.parse(inspect.getsource(torchtitan_rl))
    [typed] = [node for node in tree.body if isinstance(node, ast.If)]
    names = {alias.name for node in typed.body for alias in node.names}  # type: ignore[attr-defined]
    assert names == set(torchtitan_rl.__all__) <= set(dir(torchtitan_rl))
    for name in torchtitan_rl.__all__:
        assert getattr(torchtitan_rl, name).__name__ == name


def test_importing_it_has_no_side_effects():
    code = """
import os, sys
environment, finders = dict(os.environ), list(sys.meta_path)
import torchtitan_rl
assert dict(os.environ) == environment and sys.meta_path == finders
assert {name for name in sys.modules if name.startswith("torchtitan_rl")} == {"torchtitan_rl"}
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_configs_tasks_and_recipes_need_no_torch():
    code = """
import torchtitan_rl
from torchtitan_rl.recipes.registry import built_in_recipes
for recipe in built_in_recipes().values():
    recipe()
torchtitan_rl.RunConfig, torchtitan_rl.Task, torchtitan_rl.tool, torchtitan_rl.Episode
from torchtitan_rl.tasks import calculator, jsonl, mixture, spelling, sum_digits
"""
    assert imported(code) == set()


def test_settings_need_not_even_numpy():
    code = """
import sys
import torchtitan_rl.config
assert "numpy" not in sys.modules
"""
    assert imported(code) == set()


def test_all_errors_have_one_base():
    """Every class of the package that is an exception by its bases, as they are written."""
    bases: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [ast.unparse(base) for base in node.bases]
    known = {name: value for name, value in vars(builtins).items() if isinstance(value, type)}
    builtin = {name for name, value in known.items() if issubclass(value, BaseException)}

    def ours(name: str) -> bool:
        return name == TorchtitanRLError.__name__ or any(map(ours, bases.get(name, [])))

    def raised(name: str) -> bool:
        return name in builtin or any(map(raised, bases.get(name, [])))

    errors = [name for name in bases if raised(name)]
    assert len(errors) > 20
    assert [name for name in errors if not ours(name)] == []
