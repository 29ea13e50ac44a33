"""Rules for the whole package that a machine can check: layers, docstrings."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torchtitan_rl"
sys.path.append(str(ROOT / "docs" / "_ext"))
from layers_page import LAYERS, summary  # noqa: E402

MODULES = sorted(PACKAGE.rglob("*.py"))
PUBLIC_FACE = {"__init__.py", "__main__.py", "train.py"}


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def imported(path: Path) -> Iterator[str]:
    """Names of modules that a module imports anywhere in its text, at its top or later."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def upward_imports(path: Path) -> list[str]:
    """Modules of higher layers that a module imports; those at the top are above all layers."""
    own = LAYERS.index(layer(path))
    found = [name.split(".") for name in imported(path) if name.startswith("torchtitan_rl.")]
    tops = {file.stem for file in PACKAGE.glob("*.py")}
    return [
        ".".join(parts)
        for parts in found
        if (parts[1] in LAYERS and LAYERS.index(parts[1]) > own) or parts[1] in tops
    ]


def test_no_module_imports_a_higher_layer():
    layered = [path for path in MODULES if layer(path) not in PUBLIC_FACE]
    assert len(layered) > 100
    upward = {str(path.relative_to(PACKAGE)): upward_imports(path) for path in layered}
    assert {path: names for path, names in upward.items() if names} == {}


def test_every_module_lies_in_a_layer_or_is_the_public_face():
    assert {layer(path) for path in MODULES} <= {*LAYERS, *PUBLIC_FACE}


PURE = ("algorithms", "batching")
ACTORS = ("monarch", "vllm")


def test_algorithms_and_batching_import_no_actor():
    for path in MODULES:
        if layer(path) in PURE:
            assert not [name for name in imported(path) if name.startswith(ACTORS)], path


def test_every_module_says_what_it_has():
    for path in MODULES:
        assert summary(path), path


VAGUE = ("Of ", "Those ", "The same", "It ", "This ", "As ")
"""Beginnings of docstrings whose subject is in the line above, if anywhere."""


def body_of(node: ast.AST) -> list[ast.stmt]:
    """Statements of a node; a lambda's body is an expression."""
    body = getattr(node, "body", None)
    return body if isinstance(body, list) else []


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings of a module, its classes, functions and fields, each with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        for statement in body_of(node):
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text)), lineno=line):
                    yield line, text.strip()


def test_every_docstring_names_its_subject():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in MODULES
        for line, text in docstrings(path)
        if text.startswith(VAGUE)
    ]
    assert found == []
