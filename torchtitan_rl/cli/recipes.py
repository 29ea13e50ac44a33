"""`torchtitan-rl list`: the recipes that can be trained."""

import argparse
import sys
from collections.abc import Mapping, Sequence

from torchtitan_rl.recipes.registry import (
    DEFAULT_MODULE,
    Recipe,
    RecipeError,
    first_line,
    load_recipes,
)


def main(argv: Sequence[str], *, prog: str) -> int:
    """Print the recipes by name, each with what it is."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--module",
        default=DEFAULT_MODULE,
        help="your own recipes: path/to/file.py or package.module (default: %(default)s)",
    )
    try:
        print_recipes(load_recipes(parser.parse_args(argv).module))
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def print_recipes(found: Mapping[str, Recipe]) -> None:
    """A line for each recipe: its name and what it is."""
    width = max(map(len, found)) + 2
    for name, recipe in found.items():
        print(f"{name:{width}}{first_line(recipe)}")
