"""A task's own methods, called so that an error says which of them it is in, and where."""

import random
from collections.abc import Callable
from typing import Any, TypeVar

from torchtitan_rl.config.task import TaskConfig
from torchtitan_rl.core.errors import TorchtitanRLError, defined_at, describe_error
from torchtitan_rl.core.types import Message
from torchtitan_rl.tasks.task import Example, Task

Result = TypeVar("Result")


class TaskError(TorchtitanRLError, ValueError):
    """A method of a task failed, or returned something else than it must; the message says which,
    and where it is."""


def build(config: TaskConfig, *, seed: int) -> Task:
    """The task of a config."""
    module = getattr(type(config)._owner, "__module__", "")
    return _call(f"building task {config.name!r}", module, lambda: config.build(seed=seed))


def train_example(task: Task, index: int) -> Example:
    """Example `index` of the task's stream.

    Example:
        >>> train_example(SumDigits.Config().build(), 0).messages            # doctest: +SKIP
        [{'role': 'user', 'content': '47 85'}]
    """
    what, method = f"train_example({index})", task.train_example
    return _checked(_made(task, what, lambda: method(index)), task, what, method)


def heldout_examples(task: Task, count: int) -> list[Example]:
    """The task's examples for evaluation: at least one."""
    what, method = f"heldout_examples({count})", task.heldout_examples
    made = _made(task, what, lambda: method(count))
    if not isinstance(made, list | tuple):
        raise wrong(task, what, method, f"returned {kind(made)}; expected a list of Examples")
    if not made:
        raise wrong(task, what, method, "returned no example, and must return at least one")
    return [_checked(one, task, f"{what}[{i}]", method) for i, one in enumerate(made)]


def demonstration(task: Task, example: Example, rng: random.Random) -> str | list[Message]:
    """What the task shows of how the example is answered."""
    return _made(task, "demonstration", lambda: task.demonstration(example, rng))


def _made(task: Task, what: str, make: Callable[[], Result]) -> Result:
    return _call(f"{what} of task {task.name!r}", type(task).__module__, make)


def _call(what: str, module: str, make: Callable[[], Result]) -> Result:
    """Call something of a task's module; its error says what it was and the line."""
    try:
        return make()
    except (TaskError, NotImplementedError):  # they name the task and the method themselves
        raise
    except Exception as error:
        if isinstance(error, ValueError) and module.startswith(f"{__package__}."):
            raise  # of a built-in task: a message for the user
        raise TaskError(f"{what} raised {describe_error(error, module)}") from error


def _checked(made: Any, task: Task, what: str, method: Callable[..., Any]) -> Example:
    """The example, if it is one that can be shown to a model."""
    if not isinstance(made, Example):
        said = f"returned {kind(made)}; expected an Example(messages, expected_answer)"
        raise wrong(task, what, method, said)
    if said := _wrong_messages(made.messages):
        raise wrong(task, what, method, f"returned an Example whose {said}")
    if not isinstance(made.state, dict):
        said = f"state is {kind(made.state)}; expected a dict"
        raise wrong(task, what, method, f"returned an Example whose {said}")
    return made


def _wrong_messages(messages: Any) -> str:
    """The mistake in the messages of an example; empty if there is none."""
    form = "[{'role': 'user', 'content': '...'}]"
    if not isinstance(messages, list | tuple) or not messages:
        return f"messages are {kind(messages)}; expected a list such as {form}"
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            return f"message {number} is {kind(message)}; expected a dict, as in {form}"
        missing = [name for name in ("role", "content") if name not in message]
        if "tool_calls" in message and missing == ["content"]:
            continue
        if missing:
            return f"message {number} has no {missing[0]!r}; expected one as in {form}"
    return ""


def wrong(task: Task, what: str, method: Callable[..., Any], said: str) -> TaskError:
    """The error of a method that returned something wrong, with the line of its definition."""
    where = defined_at(method)
    return TaskError(f"{what} of task {task.name!r} {said}" + (f" ({where})" if where else ""))


def kind(value: Any) -> str:
    """A value of the wrong type in a few words.

    Example:
        >>> kind({"a": 1}), kind([]), kind(None)
        ("a dict: {'a': 1}", 'an empty list', 'None')
    """
    if value is None:
        return "None"
    name, shown = type(value).__name__, repr(value)
    if isinstance(value, list | tuple | dict | str) and not value:
        return f"an empty {name}"
    article = "an" if name[0] in "aeiou" else "a"
    return f"{article} {name}: {shown[:80]}{'…' * (len(shown) > 80)}"
