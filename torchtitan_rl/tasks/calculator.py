"""Arithmetic with a tool that does one operation at a time: "47+85-12" → 47+85, 132-12, answer 120.

The model cannot add. It learns to call the tool, to continue from its result, and not to stop
early.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan_rl.core.types import Message
from torchtitan_rl.tasks.questions import QuestionTask
from torchtitan_rl.tasks.task import Example
from torchtitan_rl.tasks.tools.tool import ArgumentsError, tool

_OPERATION = re.compile(r"\s*(-?\d{1,15})\s*([+-])\s*(\d{1,15})\s*")
_STEP = re.compile(r"[+-]?\d+")


class Calculator(QuestionTask):
    """Add and subtract a few numbers with the tool `calculator`, and end in `[ANSWER] n`."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuestionTask.Config):
        name: str = "calculator"
        min_operations: int = 2
        """Fewest operations in a question, each a call of the tool."""
        max_operations: int = 2
        """Most operations in a question."""
        digits: int = 2
        """Digits of each number."""
        hasty: float = 0.7
        """Probability that a demonstration stops before a subtraction, with the number so far."""

        def __post_init__(self) -> None:
            # With slots a dataclass is made twice, so super() refers to another class.
            QuestionTask.Config.__post_init__(self)
            if not 1 <= self.min_operations <= self.max_operations:
                raise ValueError(
                    "task.min_operations must be at least 1 and at most task.max_operations; "
                    f"got {self.min_operations} and {self.max_operations}"
                )
            if not 1 <= self.digits <= 9:
                raise ValueError(f"task.digits must be 1 to 9; got {self.digits}")
            if not 0 <= self.hasty <= 1:
                raise ValueError(f"task.hasty must be in [0, 1]; got {self.hasty}")

    config: Config
    state_columns = ("operations",)

    @tool
    def calculator(self, expression: str, state: dict[str, Any]) -> str:
        """Add or subtract two whole numbers, for example 12+34."""
        found = _OPERATION.fullmatch(expression)
        if not found:
            raise ArgumentsError(
                f"expected two whole numbers with + or - between; got {expression!r}"
            )
        left, sign, right = found.groups()
        state["operations"] = state.get("operations", 0) + 1
        return str(int(left) + int(sign + right))

    def question(self, rng: random.Random) -> str:
        low, high = 10 ** (self.config.digits - 1), 10**self.config.digits - 1
        operations = rng.randint(self.config.min_operations, self.config.max_operations)
        while True:  # ends: if all signs are +, any numbers fit
            signs = [rng.choice("+-") for _ in range(operations)]
            # Several tries with the same signs, or a - would be rare.
            for _ in range(20):
                numbers = [f"{sign}{rng.randint(low, high)}" for sign in ["", *signs]]
                question = "".join(numbers)
                # No result below zero, nor with fewer digits than the numbers have.
                if min(result for _, result in _steps(question)) >= low:
                    return question

    def expected(self, question: str) -> str:
        return str(list(_steps(question))[-1][1])

    def demonstration(self, example: Example, rng: random.Random) -> list[Message]:
        """Tool calls for one operation after the other, often ended too early before a subtraction:
        the form is right, and the mistake has a pattern that an exact reward can undo."""
        messages: list[Message] = []
        hasty = rng.random() < self.config.hasty
        running: int | None = None
        for expression, result in _steps(example.messages[-1]["content"]):
            if running is not None and hasty and "-" in expression:
                break
            call = {"name": "calculator", "arguments": {"expression": expression}}
            said = self.calculator(expression, state={})
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
                {"role": "tool", "name": "calculator", "content": said},
            ]
            running = result
        return [*messages, {"role": "assistant", "content": f"[ANSWER] {running}"}]


def _steps(question: str) -> Iterator[tuple[str, int]]:
    """The operations that answer a question, each with its result.

    Example:
        >>> list(_steps("47+85-12"))
        [('47+85', 132), ('132-12', 120)]
    """
    first, *rest = _STEP.findall(question)
    running = int(first)
    for step in rest:
        expression = f"{running}{step}"
        running += int(step)
        yield expression, running
