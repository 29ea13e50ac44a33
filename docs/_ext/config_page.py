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

OFF = """ Off by default, and only there to be changed from the command line if the recipe has
switched it on."""
HEADER = [
    "| setting | type | default | kept by a resume | meaning |",
    "| --- | --- | --- | --- | --- |",
]


def configuration() -> str:
    """Markdown: a heading and a table for each section, a row for each field."""
    for module in pkgutil.iter_modules(tasks.__path__):
        importlib.import_module(f"{tasks.__name__}.{module.name}")
    lines, fields = ["## The run", "", *HEADER], list(walk(RunConfig))
    for field, following in zip(fields, [*fields[1:], None], strict=True):
        own = following is not None and not following.section
        lines += heading(field, table=own) if field.section else [row(field)]
        if field.section or not own:
            lines += [""]
        if following is None or "." not in following.name:
            lines += variants_of(field.name.partition(".")[0], fields)
    return "\n".join(lines)


def variants_of(name: str, fields: list[Field]) -> list[str]:
    """What may stand in the place of a whole part of the config, behind all that is said of it."""
    [part] = [field for field in fields if field.name == name]
    found = variants(part.section) if part.section else []
    concrete = [cls for cls in found if not inspect.isabstract(getattr(cls, "_owner", None))]
    return [line for cls in concrete for line in variant(part, cls)]


def heading(field: Field) -> list[str]:
    level = "##" if "." not in field.name else "###"
    off = [OFF] if field.default is None else []
    return [f"({anchor(field.name)})=", f"{level} `{field.name}`", "", text(field.doc, *off), ""]


def variant(field: Field, cls: type) -> list[str]:
    """What a class adds to the section that it may stand in for, such as a task's own settings."""
    assert field.section is not None
    own = cls.__qualname__.removesuffix(".Config")
    known = {known.name: known.default for known in walk(field.section, f"{field.name}.")}
    lines = [f"({anchor(field.name)}-{own.lower()})=", f"### `{field.name}`: {own}", ""]
    lines += [text(section_doc(cls)), ""]
    lines += [f"`{cls.__module__}.{cls.__qualname__}`: all of the above, and", ""]
    for one in walk(cls, f"{field.name}.", fixed=field.fixed):
        if one.name not in known or (not one.section and one.default != known[one.name]):
            lines += entry(one, own.lower())
    return lines


def entry(field: Field, variant: str = "") -> list[str]:
    default = "no default" if field.default is MISSING else f"default {shown(field.default)}"
    target = f"{{#{anchor(field.name)}{f'-{variant}' if variant else ''}}}"
    kept = ", kept by a resume" if field.fixed else ""
    what = f"`{field.name}`{target} *{type_name(field.type)}*, {default}{kept}"
    return [what, f": {text(field.doc)}", ""]


def anchor(name: str) -> str:
    """Anchor of a field on the page, as in `configuration.html#trainer-loss-name`."""
    return name.replace(".", "-")


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
    return re.sub(r"\b(\w+\.)+(?=\w)", "", str(hint)).replace("[", "\\[")


def text(*parts: str) -> str:
    """A docstring as Markdown: what is not code is taken literally."""
    pieces = re.split(r"(`[^`]*`)", " ".join("".join(parts).split()))
    return "".join(
        piece if piece.startswith("`") else re.sub(r"([<*_$\[|])", r"\\\1", piece)
        for piece in pieces
    )
