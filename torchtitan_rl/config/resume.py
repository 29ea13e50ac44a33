"""Which settings a resumed run must keep: said by the field itself, with `Fixed[...]`."""

import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, TypeVar

T = TypeVar("T")


class _KeptByResume:
    """Marks a field in its annotation."""

    def __repr__(self) -> str:
        return "kept by a resumed run"


KEPT = _KeptByResume()

Fixed = Annotated[T, KEPT]
"""Annotates a setting that decides what a run computes, so that `--resume` may not change it. A
group annotated so is fixed as a whole.

Example:
    seed: Fixed[int] = 0
    optimizer: Fixed[OptimizerConfig] = field(default_factory=OptimizerConfig)
"""


def is_fixed(hint: Any) -> bool:
    """Whether an annotation, as `get_type_hints(..., include_extras=True)` has it, is `Fixed`."""
    return KEPT in getattr(hint, "__metadata__", ())


def fixed_settings(config: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of the settings and groups of a config that a resumed run must keep.

    Example:
        >>> list(fixed_settings(SupervisionConfig()))
        []
    """
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        if is_fixed(hints[field.name]):
            yield name
        elif is_dataclass(value):
            yield from fixed_settings(value, f"{name}.")
