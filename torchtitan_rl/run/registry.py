"""Recipes: functions that return a Controller.Config, found by name in a `config_registry` module.

The module is the `config_registry.py` of the working directory, else this repository's; `--module`
names another, as a module or as a file.
"""

import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from torchtitan_rl.core.plugins import nearest
from torchtitan_rl.run.controller import Controller

Recipe = Callable[[], Controller.Config]
DEFAULT_MODULE = "config_registry"


class RecipeError(ValueError):
    """A recipe cannot be found or does not build; the message says what to do."""


def load_module(name: str = DEFAULT_MODULE) -> ModuleType:
    """Import the module that holds the recipes; the working directory comes first."""
    folder, file = Path.cwd(), None
    if name.endswith(".py"):
        file = Path(name).absolute()
        if not file.is_file():
            raise RecipeError(f"--module {name}: there is no such file")
        folder, name = file.parent, file.stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    if name == DEFAULT_MODULE:
        sys.path.append(str(Path(__file__).parents[2]))  # in a clone: this repository's recipes
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        where = f"no {name}.py in {Path.cwd()}" if "." not in name else f"no module {name!r}"
        raise RecipeError(
            f"{where}: run from a folder with a config_registry.py, or give --module "
            "path/to/file.py or package.module"
        )
    try:
        module = importlib.import_module(name)
    except Exception as error:
        raise RecipeError(f"cannot import recipes from {name!r}: {error!r}") from error
    if file and Path(module.__file__ or "") != file:
        raise RecipeError(f"--module {file}: {name!r} is also {module.__file__}; rename the file")
    return module


def find_recipes(module: ModuleType) -> dict[str, Recipe]:
    """The module's recipes by name: its own functions whose return type is a Controller.Config."""
    return {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
        and _return_type(function) is Controller.Config
    }


def _return_type(function: Callable) -> object:
    try:
        return typing.get_type_hints(function).get("return")
    except NameError:  # some other function, annotated with a name that only type checkers import
        return None


def build_recipe(name: str, module: ModuleType) -> Controller.Config:
    """Call a recipe; an unknown name is answered with the nearest known one."""
    recipes = find_recipes(module)
    if name not in recipes:
        raise RecipeError(f"unknown recipe {name!r}; {nearest(name, recipes)}")
    try:
        return recipes[name]()
    except Exception as error:
        raise RecipeError(f"recipe {name!r} does not build: {error}") from error


def first_line(recipe: Recipe) -> str:
    return (inspect.getdoc(recipe) or "").partition("\n")[0]
