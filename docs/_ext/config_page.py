"""The configuration page: every field of `RunConfig` and of the tasks."""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import typing
from typing import Any

from config_fields import MISSING, Field, is_union, section_doc, variants, walk

from torchtitan_rl import tasks
from torchtitan_rl.config import RunConfig

OFF = """ Off by default. The command line can change it only if the recipe has switched it on."""
HEADER = [
    "| setting | type | default | kept by a resume | meaning |",
    "| --- | --- | --- | --- | --- |",
]


def configuration() -> str:
    """Markdown: a heading for each section, and a table with a row for each of its fields."""
    for module in pkgutil.iter_modules(tasks.__path__):
        importlib.import_module(f"{tasks.__name__}.{module.name}")
    fields = list(walk(RunConfig))
    parts = [field for field in fields if field.section and "." not in field.name]
    lines = ["## The run", "", *table([f for f in fields if not f.section and "." not in f.name])]
    for part in parts:
        inside = [part, *(field for field in fields if field.name.startswith(f"{part.name}."))]
        for section in (field for field in inside if field.section):
            own = [f for f in inside if not f.section and f.name.rpartition(".")[0] == section.name]
            lines += [*heading(section), *table(own)]
        lines += variants_of(part)
    return "\n".join(lines)


def variants_of(part: Field) -> list[str]:
    """What may stand in the place of a whole part of the config."""
    assert part.section is not None
    found = variants(part.section)
    concrete = [cls for cls in found if not inspect.isabstract(getattr(cls, "_owner", None))]
    return [line for cls in concrete for line in variant(part, cls)]


def heading(field: Field) -> list[str]:
    level = "##" if "." not in field.name else "###"
    off = [OFF] if field.default is None else []
    return [f"{level} `{field.name}`", "", text(field.doc, *off), ""]


def variant(field: Field, cls: type) -> list[str]:
    """What a class adds to the section that it may stand in for, such as a task's own settings."""
    assert field.section is not None
    own = cls.__qualname__.removesuffix(".Config")
    known = {known.name: known.default for known in walk(field.section, f"{field.name}.")}
    lines = [f"### `{field.name}`: {own}", "", text(section_doc(cls)), ""]
    lines += [f"`{cls.__module__}.{cls.__qualname__}`: all of the above, and", ""]
    added = [
        one
        for one in walk(cls, f"{field.name}.", fixed=field.fixed)
        if one.name not in known or (not one.section and one.default != known[one.name])
    ]
    return [*lines, *table(added)]


def table(fields: list[Field]) -> list[str]:
    return [*HEADER, *map(row, fields), ""] if fields else []


def row(field: Field) -> str:
    default = "required" if field.default is MISSING else shown(field.default)
    cells = (f"`{field.name}`", type_name(field.type), default, "yes" if field.fixed else "")
    return f"| {' | '.join(cells)} | {text(field.doc)} |"


def shown(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        return "as follows"
    return f"`{value!r}`" if value != "" else "empty"


def type_name(hint: Any) -> str:
    """A type in few words.

    Example:
        >>> type_name(tuple[float, float] | None)
        'tuple[float, float] or None'
    """
    if hint is type(None):
        return "None"
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(f"`{choice}`" for choice in typing.get_args(hint))
    if is_union(hint):
        return " or ".join(map(type_name, typing.get_args(hint)))
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint.__qualname__
    return re.sub(r"\b(\w+\.)+(?=\w)", "", str(hint)).replace("[", "\\[").replace(" | ", " or ")


def text(*parts: str) -> str:
    """A docstring as Markdown, also for a cell of a table: what is not code is taken literally."""
    pieces = re.split(r"(`[^`]*`)", " ".join("".join(parts).split()))
    return "".join(
        piece.replace("|", "\\|")
        if piece.startswith("`")
        else re.sub(r"([<*_$\[|])", r"\\\1", piece)
        for piece in pieces
    )
