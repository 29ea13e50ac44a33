"""The base of all errors of this package, errors that actors share, and how an error reads."""

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class TorchtitanRLError(Exception):
    """Base of every error that this package defines."""


class ActorBrokenError(TorchtitanRLError, RuntimeError):
    """Raised by an endpoint of an actor that cannot go on: whoever supervises it replaces it.

    A process that ends says the same. Any other error of an endpoint is about that one call, and
    the actor is called again.
    """


def describe_error(error: BaseException, module: str = "") -> str:
    """An error in one line: its type, its message and, if it came through `module`, the place.

    An error that an actor raised is described as it was raised there, without the actor's trace.

    Example:
        >>> describe_error(ValueError("prompt 0 is empty"))
        'ValueError: prompt 0 is empty'
    """
    # What Monarch wraps an actor's error in; by its shape, because this module imports no Monarch.
    inner = getattr(error, "exception", None)
    if isinstance(inner, BaseException):
        error = inner
    said = f"{type(error).__name__}: {error}"
    where = raised_at(error, module) if module else ""
    return f"{said} ({where})" if where else said


def raised_at(error: BaseException, module: str) -> str:
    """The last line of a user's module that an error came through, as file:line; empty for an error
    that was not raised in this process."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(module), "__file__", None)
    own = [frame for frame in frames if frame.filename == file]
    for frame in (own or frames)[-1:]:
        return f"{frame.filename}:{frame.lineno}"
    return ""


@contextmanager
def noting(where: str) -> Iterator[None]:
    """Add a note to an error that passes, such as "in step 7": where it happened."""
    try:
        yield
    except Exception as error:
        error.add_note(where)
        raise


def defined_at(function: Callable[..., Any]) -> str:
    """Where a function or method was written, as file:line; empty if it has no source."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""
