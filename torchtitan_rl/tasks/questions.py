"""Tasks whose questions are drawn at random; the model's answer follows `[ANSWER]`."""

import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan_rl.core.types import Rollout
from torchtitan_rl.tasks.task import Example, Reward, Task, is_heldout

_MOST_DRAWS = 100_000


class QuestionTask(Task):
    """Base of tasks that draw a question at random and know its answer."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        heldout_share: float = 0.1
        """Share of all questions that is kept for evaluation."""
        format_reward: float = 0.1
        """Reward for an answer in the required form; a right answer earns 1 in addition."""
        instructions: str = ""
        """System message that explains the task to a pretrained model; none if it is empty."""

        def __post_init__(self) -> None:
            if not 0 < self.heldout_share < 1:
                raise ValueError(f"task.heldout_share must be in (0, 1); got {self.heldout_share}")

    config: Config

    @abstractmethod
    def question(self, rng: random.Random) -> str:
        """Draw a question."""

    @abstractmethod
    def expected(self, question: str) -> Any:
        """The answer to a question."""

    def train_example(self, index: int) -> Example:
        return self._example(self._draw(random.Random(f"{self.seed}/train/{index}"), "train"))

    def heldout_examples(self, count: int) -> list[Example]:
        rng = random.Random("heldout")
        questions: dict[str, None] = {}  # an ordered set
        for _ in range(20 * count + 1000):  # far more draws than needed if there are enough
            if len(questions) == count:
                return [self._example(question) for question in questions]
            questions[self._draw(rng, "heldout")] = None
        raise ValueError(
            f"task {self.name!r} has fewer than {count} held-out questions (found "
            f"{len(questions)}); lower evaluation.prompts or raise task.heldout_share"
        )

    def _draw(self, rng: random.Random, split: Literal["train", "heldout"]) -> str:
        for _ in range(_MOST_DRAWS):
            question = self.question(rng)
            if is_heldout(question, self.config.heldout_share) == (split == "heldout"):
                return question
        raise ValueError(f"task {self.name!r} found no {split} question; change heldout_share")

    def _example(self, question: str) -> Example:
        messages = [{"role": "user", "content": question}]
        if self.config.instructions:
            messages.insert(0, {"role": "system", "content": self.config.instructions})
        return Example(messages, expected_answer=self.expected(question))

    def reward(self, completions: Sequence[Rollout], expected_answer: Any) -> list[Reward]:
        return [self._score(completion.text, str(expected_answer)) for completion in completions]

    def _score(self, text: str, expected: str) -> Reward:
        answer = self.read_answer(text)
        parts = {
            "exact": float(answer == expected),
            "format": self.config.format_reward * (answer is not None),
        }
        return Reward(sum(parts.values()), answer == expected, parts)

    def read_answer(self, text: str) -> str | None:
        """The answer at the end of a text, or None if there is none in the required form."""
        return text.rpartition("[ANSWER] ")[2].strip() or None if "[ANSWER] " in text else None
