"""Sum of digits: "47 85" → "4 11 19 24 [ANSWER] 24". Small enough for a 0.6M-parameter model."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan_rl.tasks.task import Example, Reward, Task, is_heldout
from torchtitan_rl.types import Rollout

_ANSWER = re.compile(r"\[ANSWER\] (\d+)\s*$")
_MOST_DRAWS = 100_000


class SumDigits(Task):
    """Add up the digits of a few numbers, one after the other, and end in `[ANSWER] n`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        name: str = "sum_digits"
        min_numbers: int = 2
        """Fewest numbers in a question."""
        max_numbers: int = 4
        """Most numbers in a question."""
        digits: int = 2
        """Digits of each number."""
        heldout_share: float = 0.1
        """Share of all questions that is kept for evaluation."""
        format_reward: float = 0.1
        """Reward for ending in `[ANSWER] n`, whatever n is; a right answer earns 1 besides."""
        instructions: str = ""
        """System message; a pretrained model needs to be told what is asked of it."""
        forgotten_carries: float = 0.7
        """How often a demonstration forgets the carry when its sum passes nineteen."""

        def __post_init__(self) -> None:
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
            if not 0 < self.heldout_share < 1:
                raise ValueError(f"task.heldout_share must be in (0, 1); got {self.heldout_share}")

    config: Config

    def train_example(self, index: int) -> Example:
        rng = random.Random(f"{self.seed}/train/{index}")
        return self._example(self._draw(rng, "train"))

    def heldout_examples(self, count: int) -> list[Example]:
        rng = random.Random("heldout")
        questions: dict[str, None] = {}  # a set that keeps its order
        for _ in range(20 * count + 1000):  # far more than it takes if there are enough
            if len(questions) == count:
                return [self._example(question) for question in questions]
            questions[self._draw(rng, "heldout")] = None
        raise ValueError(
            f"task {self.name!r} has fewer than {count} held-out questions (found "
            f"{len(questions)}); lower evaluation.prompts or raise task.heldout_share"
        )

    def _draw(self, rng: random.Random, split: Literal["train", "heldout"]) -> str:
        low, high = 10 ** (self.config.digits - 1), 10**self.config.digits - 1
        for _ in range(_MOST_DRAWS):
            count = rng.randint(self.config.min_numbers, self.config.max_numbers)
            question = " ".join(str(rng.randint(low, high)) for _ in range(count))
            if is_heldout(question, self.config.heldout_share) == (split == "heldout"):
                return question
        raise ValueError(f"task {self.name!r} found no {split} question; change heldout_share")

    def reward(self, completions: Sequence[Rollout], expected_answer: Any) -> list[Reward]:
        return [self._score(completion.text, int(expected_answer)) for completion in completions]

    def _score(self, text: str, expected: int) -> Reward:
        found = _ANSWER.search(text)
        # Compared as text: the digits are the model's, and may be thousands.
        correct = found is not None and (found[1].lstrip("0") or "0") == str(expected)
        parts = {
            "exact": float(correct),
            "format": self.config.format_reward * (found is not None),
        }
        return Reward(sum(parts.values()), correct, parts)

    def demonstration(self, example: Example, rng: random.Random) -> str:
        """Running sums by a teacher who is sure up to nineteen and then tends to forget a carry.

        Such a teacher is what real models start from: the form is right, the answers are so in
        part, and the mistakes have a pattern that an exact reward can undo.
        """
        forgets = rng.random() < self.config.forgotten_carries
        running, sums = 0, []
        for digit in (int(c) for c in example.messages[-1]["content"] if c.isdigit()):
            carried = running < 20 <= running + digit
            running += digit - (10 if carried and forgets else 0)
            sums.append(str(running))
        return f"{' '.join(sums)} [ANSWER] {running}"

    def _example(self, question: str) -> Example:
        messages = [{"role": "user", "content": question}]
        if self.config.instructions:
            messages.insert(0, {"role": "system", "content": self.config.instructions})
        return Example(messages, expected_answer=sum(int(c) for c in question if c.isdigit()))
