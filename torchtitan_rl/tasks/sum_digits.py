"""Sum of digits: "47 85" → "4 11 19 24 [ANSWER] 24". Small enough for a 0.6M-parameter model."""

import random
from dataclasses import dataclass

from torchtitan_rl.tasks.answers import check_pattern, last_match
from torchtitan_rl.tasks.questions import QuestionTask
from torchtitan_rl.tasks.task import Example


class SumDigits(QuestionTask):
    """Add up the digits of a few numbers, one after the other, and end in the sum."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuestionTask.Config):
        name: str = "sum_digits"
        min_numbers: int = 2
        """Fewest numbers in a question."""
        max_numbers: int = 4
        """Most numbers in a question."""
        digits: int = 2
        """Digits of each number."""
        prompt: str = "{}"
        """Question of the model, with the numbers in place of {}."""
        answer: str = r"\[ANSWER\] (\d+)\s*$"
        """Regular expression of an answer in the required form; the sum is the group of its last
        match."""
        forgotten_carries: float = 0.7
        """Probability that a demonstration forgets the carry when its sum passes nineteen."""

        def __post_init__(self) -> None:
            # With slots a dataclass is made twice, so super() refers to another class.
            QuestionTask.Config.__post_init__(self)
            if not 1 <= self.min_numbers <= self.max_numbers:
                raise ValueError(
                    "task.min_numbers must be at least 1 and at most task.max_numbers; "
                    f"got {self.min_numbers} and {self.max_numbers}"
                )
            if not 0 <= self.forgotten_carries <= 1:
                raise ValueError(
                    f"task.forgotten_carries must be in [0, 1]; got {self.forgotten_carries}"
                )
            if self.digits < 1:
                raise ValueError(f"task.digits must be at least 1; got {self.digits}")
            if self.prompt.count("{}") != 1 or any(c.isdigit() for c in self.prompt):
                raise ValueError(
                    "task.prompt must have one {}, where the numbers go, and no digits of its "
                    f"own; got {self.prompt!r}"
                )
            check_pattern(self.answer, setting="task.answer", needs_group=True)

    config: Config

    def question(self, rng: random.Random) -> str:
        low, high = 10 ** (self.config.digits - 1), 10**self.config.digits - 1
        count = rng.randint(self.config.min_numbers, self.config.max_numbers)
        numbers = " ".join(str(rng.randint(low, high)) for _ in range(count))
        return self.config.prompt.replace("{}", numbers)

    def expected(self, question: str) -> int:
        return sum(int(c) for c in question if c.isdigit())

    def read_answer(self, text: str) -> str | None:
        # As text: the model may write thousands of digits.
        found = last_match(self.config.answer, text)
        return (found.lstrip("0") or "0") if found else None

    def demonstration(self, example: Example, rng: random.Random) -> str:
        """Running sums that are right up to nineteen and then often forget a carry.

        Real models start like this: the form is right, the answers are right in part, and the
        mistakes have a pattern that an exact reward can undo.
        """
        forgets = rng.random() < self.config.forgotten_carries
        running, sums = 0, []
        for digit in (int(c) for c in example.messages[-1]["content"] if c.isdigit()):
            carried = running < 20 <= running + digit
            running += digit - (10 if carried and forgets else 0)
            sums.append(str(running))
        said = f"{' '.join(sums)} [ANSWER] {running}"
        if self.read_answer(said) != str(running):
            raise ValueError(
                f"it ends in '[ANSWER] {running}', which task.answer {self.config.answer!r} does "
                "not find; leave out task.answer, or start from a model (--model)"
            )
        return said
