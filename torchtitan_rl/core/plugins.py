"""Names in a config that stand for code: a built-in's name, or `package.module:function`."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TypeVar

from torchtitan_rl.core.settings import is_number

Function = TypeVar("Function", bound=Callable)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest known one if there is any, then all of them.

    Example:
        >>> nearest("grop", ["grpo", "rloo"])
        "did you mean 'grpo'? Known: grpo, rloo"
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    # Of names as close as each other, that with the same letters: they were only swapped.
    close.sort(key=lambda candidate: sorted(candidate) != sorted(name))
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(known) or 'none'}"


def check_name(
    name: str,
    builtins: Iterable[str],
    *,
    what: str,
    kind: Literal["function", "Class"] = "function",
) -> bool:
    """Whether a config value names a built-in; False if it is an import path, which is not imported
    here. Any other name is refused."""
    known = list(builtins)
    if ":" in name:
        return False
    if name not in known:
        raise ValueError(
            f"unknown {what} {name!r}; {nearest(name, known)}; "
            f"or give an import path `package.module:{kind}`"
        )
    return True


def check_keywords(
    name: str, known: Iterable[str], kwargs: Mapping[str, object], *, what: str
) -> None:
    """Refuse keyword arguments that a built-in, known by its table, does not take."""
    taken = list(known)
    for keyword in kwargs:
        if keyword not in taken:
            raise ValueError(
                f"{what} {name!r} cannot take kwargs {dict(kwargs)}: it has no {keyword!r}; "
                f"it takes {', '.join(taken) or 'none'}"
            )


def check_limits(
    setting: str, limits: Mapping[str, tuple[float, float]], kwargs: Mapping[str, object]
) -> None:
    """Refuse keyword arguments of a built-in that are no numbers between its limits.

    Example:
        >>> check_limits("loss.kwargs", {"clip_low": (0.0, 1.0)}, {"clip_low": -0.1})
        Traceback (most recent call last):
        ...
        ValueError: loss.kwargs.clip_low must be a number 0 to 1; got -0.1
    """
    for name, value in kwargs.items():
        least, largest = limits[name]
        if not is_number(value) or not least <= value <= largest:
            allowed = f"from {least:g} up" if largest >= 1e9 else f"{least:g} to {largest:g}"
            raise ValueError(f"{setting}.{name} must be a number {allowed}; got {value!r}")


def check_arguments(
    name: str,
    function: Callable,
    kwargs: Mapping[str, object],
    *,
    what: str,
    positional: int = 1,
    takes: str = "",
) -> None:
    """Refuse keyword arguments the function does not take, before anything calls it; and one
    without a parameter for what it `takes`, such as "a list of episodes".

    `positional` is how many arguments it is given besides.
    """
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    named_only = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    if takes and all(kind in named_only for kind in kinds):
        raise ValueError(f"{what} {name!r} must take {takes}, and has no parameter for it")
    try:
        inspect.signature(function).bind(*[None] * positional, **kwargs)
    except TypeError as error:
        taken = list(inspect.signature(function).parameters)[positional:]
        raise ValueError(
            f"{what} {name!r} cannot take kwargs {dict(kwargs)}: {error}; it takes "
            f"{', '.join(taken) or 'none'}"
        ) from error


def resolve(
    name: str,
    builtins: Mapping[str, Function],
    *,
    what: str,
    kind: Literal["function", "Class"] = "function",
) -> Function:
    """The function or class that a config value stands for; every way to get it wrong has its own
    message."""
    if check_name(name, builtins, what=what, kind=kind):
        return builtins[name]
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a plug-in may fail in any way while it is imported
        raise ValueError(f"{what} {name!r}: cannot import {module_name!r}: {error!r}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = [
            n
            for n, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        ]
        lacks = "has no function" if kind == "function" else "has no class"
        raise ValueError(
            f"{what} {name!r}: {module_name!r} {lacks} {attribute!r}; "
            f"{nearest(attribute, functions)}"
        )
    return function
