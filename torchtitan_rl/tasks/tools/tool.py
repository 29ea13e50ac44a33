"""Tools: methods of a task that the model may call."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pydantic

from torchtitan_rl.core.errors import TorchtitanRLError, defined_at

_MARK = "__torchtitan_rl_tool__"


class ArgumentsError(TorchtitanRLError, ValueError):
    """Arguments of a call make no sense to the tool; the message is for the model. A tool raises it
    to say that the model is to blame, and not the tool.

    Example:
        raise ArgumentsError(f"expected a city; got {city!r}")
    """


@dataclass(slots=True)
class ToolCall:
    """A tool call as the model wrote it."""

    name: str
    arguments: Any
    problem: str = ""
    """Error in the call's form, or empty; a malformed call is answered with it, never made."""


@dataclass(frozen=True, slots=True)
class ToolFailure:
    """How a tool failed at a call whose form and types were right."""

    said: str
    """The exception and its line, or what else happened: for the author of the tool."""
    clear: bool = True
    """Whether the tool is to blame; else it may be its arguments."""


@dataclass(slots=True)
class Tool:
    """A function that the model may call, and its description for the model.

    Arguments of the tool are those of the function, by name and type, without `state`: an argument
    of that name gets the conversation's state, which the function may change.
    """

    name: str
    function: Callable[..., Any]
    schema: type[pydantic.BaseModel]
    takes_state: bool

    @property
    def spec(self) -> dict[str, Any]:
        """Description of the tool in OpenAI's format, which chat templates render."""
        parameters = self.schema.model_json_schema()
        parameters.pop("title", None)
        for entry in parameters.get("properties", {}).values():
            entry.pop("title", None)
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": inspect.getdoc(self.function) or "",
                "parameters": parameters,
            },
        }

    def arguments(self, given: Any) -> dict[str, Any]:
        """Arguments for the function, checked and converted by their types."""
        if not isinstance(given, dict):
            raise ArgumentsError(f"arguments of {self.name} must be an object")
        try:
            checked = self.schema.model_validate(given)
        except pydantic.ValidationError as error:
            said = "; ".join(
                f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors()
            )
            raise ArgumentsError(f"wrong arguments of {self.name}: {said}") from error
        fields = type(checked).model_fields
        return {str(field.alias): getattr(checked, name) for name, field in fields.items()}


def tool(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method of a task as a tool; its docstring describes it to the model.

    Example:
        @tool
        def calculator(self, expression: str) -> str:
            "Evaluate an expression such as 12+34."
            return str(evaluate(expression))
    """
    setattr(method, _MARK, True)
    return method


def find_tools(task: object) -> dict[str, Tool]:
    """Tools of a task, by name; a tool that cannot be described is an error that names it."""
    tools = {}
    for name, function in inspect.getmembers(type(task), callable):
        if getattr(function, _MARK, False):
            try:
                tools[name] = _describe(name, getattr(task, name))
                _ = tools[name].spec  # a type may be checked and have no description
            except Exception as error:  # a type that does not exist, or that pydantic cannot check
                said = " ".join(str(error).split())
                raise ValueError(
                    f"tool {name!r} of {type(task).__name__} cannot be described: {said} "
                    f"({defined_at(function)})"
                ) from error
    return tools


def _describe(name: str, function: Callable[..., Any]) -> Tool:
    parameters = inspect.signature(function, eval_str=True).parameters
    fields: dict[str, Any] = {}
    for parameter in parameters.values():
        if parameter.name == "state":
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"it takes {parameter}: arguments are given by name")
        if parameter.annotation is parameter.empty:
            raise ValueError(f"give its argument {parameter.name!r} a type")
        default = ... if parameter.default is parameter.empty else parameter.default
        # Under an alias, as an argument may have a name that pydantic uses itself.
        field = pydantic.Field(default, alias=parameter.name)
        fields[f"argument_{len(fields)}"] = (parameter.annotation, field)
    schema = pydantic.create_model(name, __config__={"extra": "forbid"}, **fields)
    return Tool(name, function, schema, takes_state="state" in parameters)
