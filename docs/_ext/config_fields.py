"""Fields of the config dataclasses: dotted names, types, defaults, and the strings under them."""

import ast
import dataclasses
import functools
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan_rl.config.resume import is_fixed

MISSING = dataclasses.MISSING


class UndocumentedError(ValueError):
    """A field without a docstring."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a config."""

    name: str
    """Dotted, as on the command line."""
    type: Any
    default: Any
    """MISSING if it has none."""
    doc: str
    section: type | None
    """The dataclass of its own fields, if it is a section."""
    fixed: bool
    """Whether a resumed run must keep it: by itself, or with its section."""


def config_fields(
    cls: type, prefix: str = "", instance: Any = None, *, fixed: bool = False
) -> list[Field]:
    """The fields of one dataclass, without those of its sections; `fixed`: it is fixed as a whole.

    `instance` is the section's default value, whose fields may differ from the class's own
    defaults: `generator.sampling.n` is 8, though `SamplingConfig.n` is 1.
    """
    docs, hints = field_docs(cls), typing.get_type_hints(cls)
    annotated = typing.get_type_hints(cls, include_extras=True)
    found = []
    for field in dataclasses.fields(cls):
        section = section_of(hints[field.name])
        doc = docs.get(field.name) or (section_doc(section) if section else "")
        if not doc:
            raise UndocumentedError(
                f"{prefix}{field.name} has no docstring: write a string under the field in "
                f"{cls.__module__}.{cls.__qualname__}"
            )
        value = default_of(field) if instance is None else getattr(instance, field.name)
        kept = fixed or is_fixed(annotated[field.name])
        found.append(Field(prefix + field.name, hints[field.name], value, doc, section, kept))
    return found


def walk(
    cls: type, prefix: str = "", instance: Any = None, *, fixed: bool = False
) -> Iterator[Field]:
    """All fields of a config and of its sections: own fields first, then section by section."""
    found = config_fields(cls, prefix, instance, fixed=fixed)
    yield from (field for field in found if not field.section)
    for field in found:
        if field.section:
            yield field
            nested = field.default if dataclasses.is_dataclass(field.default) else None
            yield from walk(field.section, f"{field.name}.", nested, fixed=field.fixed)


def variants(cls: type) -> list[type]:
    """The dataclasses of this package that may stand in a section's place, by name."""
    found: dict[str, type] = {}
    for sub in cls.__subclasses__():
        own = _by_name(sub)  # with slots, a dataclass is made twice; only one has the name
        if own is sub and sub.__module__.startswith("torchtitan_rl."):
            found[sub.__qualname__] = sub
            found |= {variant.__qualname__: variant for variant in variants(sub)}
    return [found[name] for name in sorted(found)]


def _by_name(cls: type) -> Any:
    value: Any = sys.modules[cls.__module__]
    for part in cls.__qualname__.split("."):
        value = getattr(value, part, None)
    return value


def default_of(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def section_of(hint: Any) -> type | None:
    """The dataclass in a type, alone or with None."""
    options = typing.get_args(hint) if is_union(hint) else (hint,)
    return next((o for o in options if isinstance(o, type) and dataclasses.is_dataclass(o)), None)


def is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def section_doc(cls: type) -> str:
    """The first paragraph of a class's docstring; of a `Config` without one, that of its owner."""
    return inspect.cleandoc(_own_doc(cls) or _own_doc(_owner(cls))).partition("\n\n")[0]


def _own_doc(cls: type | None) -> str:
    doc = (cls.__dict__.get("__doc__") or "") if cls else ""
    # A dataclass without a docstring gets its signature as one.
    return "" if cls and doc.startswith(f"{cls.__name__}(") else doc


def _owner(cls: type) -> type | None:
    parent = sys.modules[cls.__module__]
    for part in cls.__qualname__.split(".")[:-1]:
        parent = getattr(parent, part)
    return parent if isinstance(parent, type) else None


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The string under each field; a field that is defined again may leave it to its parent."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            docs |= _strings_under_fields(base)
    return docs


def _strings_under_fields(cls: type) -> dict[str, str]:
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for node, following in zip(definition.body, definition.body[1:], strict=False):
        match node, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.split())
    return docs
