"""Names in a config that stand for functions: a built-in's name, or `package.module:function`."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

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


def resolve(name: str, builtins: Mapping[str, Function], *, what: str) -> Function:
    """The function behind a config value; every way to get it wrong has its own message."""
    if ":" not in name:
        if name not in builtins:
            raise ValueError(
                f"unknown {what} {name!r}; {nearest(name, builtins)}; "
                "or give an import path `package.module:function`"
            )
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
        raise ValueError(
            f"{what} {name!r}: {module_name!r} has no function {attribute!r}; "
            f"{nearest(attribute, functions)}"
        )
    return function
