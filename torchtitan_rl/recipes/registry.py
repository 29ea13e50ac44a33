"""Recipes by name: the built-in ones, and those of the user's own `config_registry` module.

The user's module is the `config_registry.py` of the working directory; `--module` names another, as
a module or as a file.
"""

import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from torchtitan_rl.config import RunConfig
from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.core.plugins import nearest
from torchtitan_rl.recipes import qwen3, smollm2, tiny

Recipe = Callable[[], RunConfig]
DEFAULT_MODULE = "config_registry"
BUILT_IN = (tiny, smollm2, qwen3)
"""Modules of the built-in recipes, in the order in which these are listed."""


class RecipeError(TorchtitanRLError, ValueError):
    """A recipe cannot be found or does not build; the message says what to do."""


def load_recipes(name: str = DEFAULT_MODULE) -> dict[str, Recipe]:
    """The built-in recipes and those of the user's module, by name; two of one name are refused."""
    module, found = load_module(name), built_in_recipes()
    for own, recipe in (find_recipes(module) if module else {}).items():
        if own in found:
            assert module is not None
            raise RecipeError(
                f"recipe {own!r} of {module.__file__} has the name of a built-in recipe: rename it"
            )
        found[own] = recipe
    return found


def built_in_recipes() -> dict[str, Recipe]:
    """The recipes that come with this package, by name."""
    return {name: recipe for module in BUILT_IN for name, recipe in find_recipes(module).items()}


def load_module(name: str = DEFAULT_MODULE) -> ModuleType | None:
    """Import the user's module of recipes; the working directory comes first. None: there is no
    `config_registry`, and no other module was named."""
    folder, file = Path.cwd(), None
    if name.endswith(".py"):
        file = Path(name).absolute()
        if not file.is_file():
            raise RecipeError(f"--module {name}: there is no such file")
        folder, name = file.parent, file.stem
    # Plug-ins are found in both folders; a console script has neither on its path.
    for place in map(str, (Path.cwd(), folder)):
        if place not in sys.path:
            sys.path.insert(0, place)
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        if name == DEFAULT_MODULE:
            return None
        where = f"no {name}.py in {Path.cwd()}" if "." not in name else f"no module {name!r}"
        raise RecipeError(f"{where}: give --module path/to/file.py or package.module")
    try:
        module = importlib.import_module(name)
    except Exception as error:
        said = f"cannot import recipes from {name!r}: {error!r}{_hint(error)}"
        raise RecipeError(said) from error
    if file and Path(module.__file__ or "") != file:
        raise RecipeError(f"--module {file}: {name!r} is also {module.__file__}; rename the file")
    return module


def _hint(error: Exception) -> str:
    """What to write in place of an import from `config_registry`, which is the user's own file."""
    if isinstance(error, ImportError) and error.name == DEFAULT_MODULE:
        return "; built-in recipes are in torchtitan_rl.recipes: import them from there"
    return ""


def find_recipes(module: ModuleType) -> dict[str, Recipe]:
    """A module's recipes by name: its own public functions whose return type is a RunConfig."""
    return {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
        and _return_type(function) is RunConfig
    }


def _return_type(function: Callable[..., object]) -> object:
    try:
        return typing.get_type_hints(function).get("return")
    except NameError:  # some other function, annotated with a name that only type checkers import
        return None


def build_recipe(name: str, recipes: Mapping[str, Recipe]) -> RunConfig:
    """Call a recipe; an unknown name is answered with the nearest known one."""
    if name not in recipes:
        raise RecipeError(f"unknown recipe {name!r}; {nearest(name, recipes)}")
    try:
        return recipes[name]()
    except Exception as error:
        raise RecipeError(f"recipe {name!r} does not build: {error}") from error


def first_line(recipe: Recipe) -> str:
    """What a recipe is, in one line: the first of its docstring."""
    return (inspect.getdoc(recipe) or "").partition("\n")[0]
