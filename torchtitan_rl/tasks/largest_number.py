"""Largest number: "Which number is the largest: 59, 63, 15 or 40?" → "The largest number is 63."

A small language model knows how to compare numbers in part, and goes on talking after its answer.
"""

import random
from dataclasses import dataclass

from torchtitan_rl.tasks.answers import check_pattern, last_match
from torchtitan_rl.tasks.questions import QuestionTask


class LargestNumber(QuestionTask):
    """Say which of a few numbers is the largest, and end there."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuestionTask.Config):
        name: str = "largest_number"
        numbers: int = 4
        """Numbers in a question."""
        digits: int = 2
        """Digits of each number."""
        answer: str = r"(?<![\d.,-])(\d+)\.?\s*$"
        """Regular expression of an answer in the required form; the number is the group of its last
        match. By default the completion must end in it."""

        def __post_init__(self) -> None:
            QuestionTask.Config.__post_init__(self)
            if self.digits < 1:
                raise ValueError(f"task.digits must be at least 1; got {self.digits}")
            most = 9 * 10 ** (self.digits - 1)
            if not 2 <= self.numbers <= most:
                raise ValueError(
                    f"task.numbers must be at least 2 and at most {most}, the numbers of "
                    f"task.digits {self.digits}; got {self.numbers}"
                )
            check_pattern(self.answer, setting="task.answer", needs_group=True)

    config: Config

    def question(self, rng: random.Random) -> str:
        low, high = 10 ** (self.config.digits - 1), 10**self.config.digits
        *others, last = map(str, rng.sample(range(low, high), self.config.numbers))
        return f"Which number is the largest: {', '.join(others)} or {last}?"

    def expected(self, question: str) -> int:
        _, _, listed = question.partition(": ")
        return max(map(int, listed.rstrip("?").replace(" or ", ", ").split(", ")))

    def read_answer(self, text: str) -> str | None:
        return last_match(self.config.answer, text)
