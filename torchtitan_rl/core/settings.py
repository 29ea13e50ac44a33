"""Check of a config's numbers: a setting that is declared as a number must be a number.

Without it `importance_cap=True` would be a cap of 1, because a bool of Python is an int, and a text
would fail only where it is used in a computation.
"""

import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import cycle
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar

Class = TypeVar("Class", bound=type)


def checks_numbers(cls: Class) -> Class:
    """A class decorator for configs, which are dataclasses with keyword arguments only: a number
    field that is given anything else raises an error.

    Example:
        >>> CorrectionConfig(importance_weight="token", importance_cap=True)
        Traceback (most recent call last):
        ...
        ValueError: CorrectionConfig.importance_cap must be a number; got True
    """
    init: Callable[..., None] = vars(cls)["__init__"]
    if hasattr(init, "checks_numbers"):
        return cls

    @functools.wraps(init)
    def checked(self: Any, **settings: Any) -> None:
        hints = _hints(cls)
        for name, value in settings.items():
            if wanted := misses(hints.get(name), value):
                raise ValueError(f"{cls.__qualname__}.{name} must be {wanted}; got {value!r}")
        init(self, **settings)

    checked.checks_numbers = True  # type: ignore[attr-defined]
    type.__setattr__(cls, "__init__", checked)
    return cls


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number; a bool is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def misses(hint: Any, value: Any) -> str:
    """What a value should be, if its annotation asks for numbers and it is none; else empty.

    Example:
        >>> misses(int, 2.5), misses(float | None, True), misses(tuple[float, float], (0, 1))
        ('a whole number', 'a number', '')
        >>> misses(tuple[float, float], (False, True))
        'numbers'
    """
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = set(typing.get_args(hint) if union else [hint])
    if value is None and type(None) in options:
        return ""
    options.discard(type(None))
    if options and options <= {int, float}:
        if float in options:
            return "" if is_number(value) else "a number"
        return "" if is_number(value) and isinstance(value, Integral) else "a whole number"
    if len(options) == 1 and isinstance(value, list | tuple):
        (many,) = options
        if typing.get_origin(many) in (list, tuple):
            kinds = [kind for kind in typing.get_args(many) if kind is not Ellipsis]
            found = (misses(kind, each) for kind, each in zip(cycle(kinds), value, strict=False))
            return next((f"{wanted.removeprefix('a ')}s" for wanted in found if wanted), "")
    return ""
