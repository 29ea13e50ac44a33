"""Tools from methods: how they are described, and what they may be called with."""

import enum
from typing import Annotated, Any, Literal

import pydantic
import pytest

from torchtitan_rl.tasks.tools.tool import ArgumentsError, find_tools, tool


class Unit(enum.Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


class Place(pydantic.BaseModel):
    city: str
    country: str = "FR"


class Weather:
    @tool
    def forecast(
        self,
        city: str,
        days: int = 3,
        unit: Literal["celsius", "kelvin"] = "celsius",
        hours: list[int] | None = None,
    ) -> str:
        """The weather of the next days.

        Of every hour, if hours are given.
        """
        return f"{city} {days} {unit} {hours}"

    @tool
    def remember(self, state: dict[str, Any], note: Annotated[str, pydantic.Field(max_length=5)]):
        state["note"] = note

    @tool
    def convert(self, *, schema: Unit, json: float, copy: Place | None = None) -> Any:
        """Its arguments have names that pydantic uses."""
        return schema, json, copy

    @tool
    async def nothing(self) -> None:
        """Takes no arguments."""

    def no_tool(self, x):
        """Not for the model."""


class Arctic(Weather):
    @tool
    def forecast(self, city: str) -> str:
        """It will be cold."""
        return "cold"


TOOLS = find_tools(Weather())


def test_marked_methods_are_tools_and_subclasses_may_change_them():
    assert list(TOOLS) == ["convert", "forecast", "nothing", "remember"]
    arctic = find_tools(Arctic())
    assert list(arctic) == list(TOOLS)
    assert arctic["forecast"].spec["function"]["description"] == "It will be cold."
    assert arctic["forecast"].function("Alert") == "cold"


def test_a_spec_comes_from_signature_types_and_docstring():
    assert TOOLS["forecast"].spec == {
        "type": "function",
        "function": {
            "name": "forecast",
            "description": "The weather of the next days.\n\nOf every hour, if hours are given.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "required": ["city"],
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer", "default": 3},
                    "unit": {
                        "type": "string",
                        "enum": ["celsius", "kelvin"],
                        "default": "celsius",
                    },
                    "hours": {
                        "anyOf": [
                            {"type": "array", "items": {"type": "integer"}},
                            {"type": "null"},
                        ],
                        "default": None,
                    },
                },
            },
        },
    }


def test_the_state_is_not_the_models_to_give():
    remember = TOOLS["remember"]
    assert remember.takes_state
    assert not TOOLS["forecast"].takes_state
    assert remember.spec["function"]["description"] == ""
    parameters = remember.spec["function"]["parameters"]
    assert parameters["properties"] == {"note": {"type": "string", "maxLength": 5}}
    assert parameters["required"] == ["note"]
    with pytest.raises(ArgumentsError, match="remember: state: Extra inputs are not permitted"):
        remember.arguments({"note": "x", "state": {}})


def test_names_that_pydantic_uses_are_fine():
    parameters = TOOLS["convert"].spec["function"]["parameters"]
    assert list(parameters["properties"]) == parameters["required"] + ["copy"]
    given = {"schema": "kelvin", "json": 1, "copy": {"city": "Nice"}}
    assert TOOLS["convert"].arguments(given) == {
        "schema": Unit.KELVIN,
        "json": 1.0,
        "copy": Place(city="Nice"),
    }


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("forecast", {"city": "Oslo"}, ("Oslo", 3, "celsius", None)),
        ("forecast", {"city": "Oslo", "days": "7"}, ("Oslo", 7, "celsius", None)),
        ("forecast", {"city": "Oslo", "hours": ["1", 2.0]}, ("Oslo", 3, "celsius", [1, 2])),
        ("nothing", {}, ()),
    ],
)
def test_arguments_are_converted(name, given, expected):
    assert tuple(TOOLS[name].arguments(given).values()) == expected


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("forecast", [], "arguments of forecast must be an object"),
        ("forecast", None, "arguments of forecast must be an object"),
        ("forecast", {}, "wrong arguments of forecast: city: Field required"),
        ("forecast", {"city": 5}, "city: Input should be a valid string"),
        ("forecast", {"city": "Oslo", "days": 1.5}, "days: Input should be a valid integer"),
        ("forecast", {"city": "Oslo", "hours": [1, "x"]}, "hours.1: Input should be"),
        ("forecast", {"city": "Oslo", "unit": "F"}, "unit: Input should be 'celsius' or 'kelvin'"),
        ("forecast", {"town": "Oslo"}, "Field required; town: Extra inputs are not permitted"),
        ("forecast", {"argument_0": "Oslo"}, "argument_0: Extra inputs are not permitted"),
        ("remember", {"note": "too long"}, "note: String should have at most 5 characters"),
        ("nothing", {"x": 1}, "x: Extra inputs are not permitted"),
    ],
)
def test_wrong_arguments_are_refused_with_the_reason(name, given, told):
    with pytest.raises(ArgumentsError) as caught:
        TOOLS[name].arguments(given)
    assert told in str(caught.value)


def takes_any(self, *words: str): ...
def takes_names(self, **names: str): ...
def by_position(self, word: str, /): ...
def untyped(self, word): ...
def unknown_type(self, word: "Wrod"): ...  # noqa: F821
def unchecked_type(self, word: pytest.Config): ...


@pytest.mark.parametrize(
    ("method", "why"),
    [
        (takes_any, r"it takes \*words: str: arguments are given by name"),
        (takes_names, r"it takes \*\*names: str: arguments are given by name"),
        (by_position, "it takes word: str: arguments are given by name"),
        (untyped, "give its argument 'word' a type"),
        (unknown_type, "name 'Wrod' is not defined"),
        (unchecked_type, "Unable to generate pydantic-core schema"),
    ],
)
def test_what_cannot_be_described_is_an_error_that_names_the_tool(method, why):
    task = type("Broken", (), {"lookup": tool(method)})()
    with pytest.raises(ValueError, match=f"tool 'lookup' of .* cannot be described: {why}"):
        find_tools(task)
