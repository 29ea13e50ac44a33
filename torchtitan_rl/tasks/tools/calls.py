"""One call of a tool, or of `Task.answer`: the request, making the call, and its result.

Whatever a tool does or returns becomes a `Result`. The same code runs in a worker process and, for
`async def` tools, on the environment's own event loop.
"""

import inspect
import json
import pickle
import struct
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan_rl.core.errors import raised_at
from torchtitan_rl.core.types import Message, Outcome
from torchtitan_rl.tasks.task import Task
from torchtitan_rl.tasks.tools.tool import ArgumentsError, Tool, ToolFailure

LENGTH = struct.Struct("!Q")
"""Precedes every pickle between the environment and a worker."""
MOST_TRACEBACKS = 3
"""Most tracebacks that a process logs per tool and kind of error."""
_LOGGED: Counter[tuple[str, str, str]] = Counter()
ANSWERING_ROLES = ("user", "system", "tool")
"""Roles of messages that `Task.answer` may return."""
OF_ARGUMENTS = (ValueError, LookupError, ArithmeticError, SyntaxError, FileNotFoundError)
"""Exceptions that good tools raise for bad arguments, such as `int("x")` or a name they do not
know."""
MAX_ERROR_CHARS = 500
"""Longest error shown to the model: it must not push the task out of its context."""
MAX_RESULT_BYTES = 2**26
"""Largest result of a worker; nearly all of it is state, which is sent with every call."""


@dataclass(slots=True)
class Call:
    """Request for a call: of a tool that exists, or of `Task.answer`."""

    task: str
    tool: str | None
    """Name of the tool; None calls `Task.answer`."""
    state: dict[str, Any]
    arguments: Any = None
    """Arguments of the tool."""
    messages: list[Message] = field(default_factory=list)
    """The conversation, for `Task.answer`."""
    max_chars: int = 8192
    """Longest result of a tool, or message; the rest is cut off."""


@dataclass(slots=True)
class Result:
    """Result of a call."""

    outcome: Outcome
    text: str = ""
    """The tool's result, or the error, as a sentence without its subject."""
    state: dict[str, Any] = field(default_factory=dict)
    """The state after the call, if it succeeded."""
    messages: list[Message] = field(default_factory=list)
    """Messages that `Task.answer` returned."""
    failure: ToolFailure | None = None
    """How the tool failed, if it is to blame."""


@dataclass(slots=True)
class Offer:
    """Tools of a task, and whether it answers the model."""

    tools: dict[str, bool]
    """Per tool, by name, whether it is `async def`."""
    answer: Literal["none", "sync", "async"]

    @property
    def waits(self) -> bool:
        """Whether a tool or the answer is `async def`."""
        return any(self.tools.values()) or self.answer == "async"


class Member:
    """A task in a worker, with what can be called."""

    def __init__(self, task: Task) -> None:
        self.task, self.tools = task, task.tools

    @property
    def offer(self) -> Offer:
        answer: Literal["none", "sync", "async"] = "sync"
        if not self.task.answers:
            answer = "none"
        elif inspect.iscoroutinefunction(self.task.answer):
            answer = "async"
        return Offer({name: _is_async(tool) for name, tool in self.tools.items()}, answer)

    def begin(self, call: Call) -> Any:
        """Start a call; returns the result, or for `async def` an awaitable."""
        if call.tool is None:
            return self.task.answer(call.messages, call.state)
        tool = self.tools[call.tool]
        arguments = tool.arguments(call.arguments)
        if tool.takes_state:
            arguments["state"] = call.state
        return tool.function(**arguments)


def _is_async(tool: Tool) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(tool.function))


def make(members: dict[str, Member], call: Call) -> Result:
    """Make a call and return its result; never raises."""
    try:
        returned = members[call.task].begin(call)
        if inspect.isawaitable(returned):
            raise TypeError("returned something to await: declare it with `async def`")
        return _returned(call, returned)
    except BaseException as error:  # sys.exit() too
        _log(call, error)
        return failed(error, _module(members, call))


async def make_async(members: dict[str, Member], call: Call) -> Result:
    """Make a call of something `async def`; raises nothing but its own cancellation."""
    try:
        return _returned(call, await members[call.task].begin(call))
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # these two would end the actor
        _log(call, error)
        return failed(error, _module(members, call))


def _module(members: dict[str, Member], call: Call) -> str:
    member = members.get(call.task)
    return type(member.task).__module__ if member else ""


def _log(call: Call, error: BaseException) -> None:
    """Log the first tracebacks of each kind for the author of the tool."""
    kind = (call.task, call.tool or "answer", type(error).__name__)
    _LOGGED[kind] += 1
    if _LOGGED[kind] <= MOST_TRACEBACKS and not isinstance(error, ArgumentsError):
        print(f"{kind[1]} of task {call.task!r}:", file=sys.stderr)
        traceback.print_exception(error)


def _returned(call: Call, returned: Any) -> Result:
    if call.tool is not None:
        return Result("ok", text_of(returned, call.max_chars), call.state)
    if wrong := _not_messages(returned):
        return Result("raised", f"returned {wrong}; expected a list of messages")
    messages = [_cut_message(message, call.max_chars) for message in returned]
    return Result("ok", state=call.state, messages=messages)


def _not_messages(returned: Any) -> str:
    """Error in what `Task.answer` returned, or empty."""
    if not isinstance(returned, list):
        return shortened(repr(returned), 100)
    for message in returned:
        if not isinstance(message, dict) or message.get("role") not in ANSWERING_ROLES:
            roles = ", ".join(ANSWERING_ROLES)
            return f"{shortened(repr(message), 100)} as a message, whose role is none of {roles}"
        if not isinstance(message.get("content"), str):
            return f"{shortened(repr(message), 100)} as a message, whose content is no text"
    return ""


def _cut_message(message: Message, max_chars: int) -> Message:
    return {
        key: shortened(value, max_chars) if isinstance(value, str) else value
        for key, value in message.items()
    }


def text_of(returned: Any, max_chars: int) -> str:
    """Text of a tool's result for the model.

    Example:
        >>> [text_of(returned, 10) for returned in ("é", {"a": 1.5}, None, b"bytes", "x" * 99)]
        ['é', '{"a": 1.5}', 'null', 'bytes', 'xxxxxxxxxx… [89 characters left out]']
    """
    if isinstance(returned, str):
        return shortened(returned, max_chars)
    if isinstance(returned, bytes | bytearray):
        return shortened(returned.decode(errors="replace"), max_chars)
    try:
        return shortened(json.dumps(returned, ensure_ascii=False), max_chars)
    except (TypeError, ValueError, RecursionError):  # not JSON, or it contains itself
        return shortened(repr(returned), max_chars)


def shortened(text: str, max_chars: int) -> str:
    """Text cut to `max_chars`, with a note of how much is missing; never invalid UTF-8."""
    missing = len(text) - max_chars
    note = f"… [{missing} characters left out]" if missing > 0 else ""
    return clean(text[:max_chars]) + note


def clean(text: str) -> str:
    """Text without lone surrogates, which no tokenizer and no file accepts."""
    return text.encode(errors="replace").decode()


def failed(error: BaseException, module: str = "") -> Result:
    """Result of a call that raised: the exception's message for the model, without a traceback; and
    with the line of the task's `module` for the author of the tool."""
    try:
        said = str(error)
    except Exception:  # an exception class of the tool's author may fail here
        said = ""
    if isinstance(error, ArgumentsError):
        return Result("malformed", shortened(said, MAX_ERROR_CHARS))
    kind = type(error).__name__
    text = shortened(f"raised {kind}: {said}" if said else f"raised {kind}", MAX_ERROR_CHARS)
    where = raised_at(error, module)
    failure = ToolFailure(f"{text} ({where})" if where else text, not may_be_arguments(error))
    return Result("raised", text, failure=failure)


def may_be_arguments(error: BaseException) -> bool:
    """Whether an exception may come of what the model asked for: by its type, or because code that
    the model wrote has raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, OF_ARGUMENTS) or bool(frames and frames[-1].filename[:1] == "<")


def packed(result: Result) -> bytes:
    """Pickle of a result; one that cannot be pickled becomes a result that says so."""
    try:
        data = pickle.dumps(result)
    except Exception as error:  # anything may be in a state
        why = shortened(f"{type(error).__name__}: {error}", MAX_ERROR_CHARS)
        return pickle.dumps(Result("raised", f"left a state that cannot be pickled: {why}"))
    if len(data) > MAX_RESULT_BYTES:
        mib = MAX_RESULT_BYTES // 2**20
        return pickle.dumps(Result("raised", f"left a state of more than {mib} MiB"))
    return data
