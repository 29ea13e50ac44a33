"""The tree of packages on the concepts page, read from the code."""

import ast
import inspect
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "torchtitan_rl"

LAYERS = (
    *("core", "config", "platform", "algorithms", "batching", "observability", "tasks"),
    *("weight_sync", "hosts", "models", "engines", "actors", "supervision"),
    *("rollout", "view", "run", "recipes", "cli"),
)
"""The packages, lowest first: a module imports from its own package and from lower ones only."""


def layers() -> str:
    """Markdown: a section for each package, lowest first, with a line for each of its modules."""
    lines: list[str] = []
    for name in present():
        lines += [f"### `{name}/`", "", summary(PACKAGE / name / "__init__.py"), ""]
        lines += ["| module | what it has |", "| --- | --- |"]
        lines += [
            f"| `{path.relative_to(PACKAGE / name)}` | {escaped(summary(path))} |"
            for path in sorted((PACKAGE / name).rglob("*.py"))
            if path.name != "__init__.py"
        ]
        lines.append("")
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Text for a cell of a Markdown table.

    Example:
        >>> escaped("outputs/<run>/, or `<run>`")
        'outputs/&lt;run>/, or `<run>`'
    """
    pieces = text.replace("|", "\\|").split("`")  # every second one is code
    return "`".join(
        piece if i % 2 else piece.replace("<", "&lt;") for i, piece in enumerate(pieces)
    )


def present() -> list[str]:
    """Layers that the package has."""
    return [name for name in LAYERS if (PACKAGE / name / "__init__.py").is_file()]


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line.

    Raises ValueError for a module without a docstring.
    """
    doc = ast.get_docstring(ast.parse(path.read_text()))
    if not doc:
        raise ValueError(f"{path} has no docstring")
    return " ".join(inspect.cleandoc(doc).partition("\n\n")[0].split())
