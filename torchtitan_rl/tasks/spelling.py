"""Spelling with a tool that knows the radio alphabet: "cab" → "[ANSWER] charlie alfa bravo".

The tool's result follows from its argument, so a model that echoes results can learn to predict
them: `echo_nll` falls towards 0.
"""

import random
from dataclasses import dataclass
from typing import Any

from torchtitan_rl.core.types import Message
from torchtitan_rl.tasks.questions import QuestionTask
from torchtitan_rl.tasks.task import Example
from torchtitan_rl.tasks.tools.tool import ArgumentsError, tool

_ALPHABET = """
alfa bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar papa
quebec romeo sierra tango uniform victor whiskey xray yankee zulu
"""
WORDS = {word[0]: word for word in _ALPHABET.split()}


class Spelling(QuestionTask):
    """Spell a few letters with the tool `spell`, and end in `[ANSWER]` and all its words."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuestionTask.Config):
        name: str = "spelling"
        min_letters: int = 2
        """Fewest letters in a question."""
        max_letters: int = 5
        """Most letters in a question."""
        forgetful: float = 0.7
        """Probability that a demonstration of four letters or more leaves out the last word."""

        def __post_init__(self) -> None:
            QuestionTask.Config.__post_init__(self)
            if not 1 <= self.min_letters <= self.max_letters <= len(WORDS):
                raise ValueError(
                    "task.min_letters must be at least 1 and at most task.max_letters, and that at "
                    f"most {len(WORDS)}; got {self.min_letters} and {self.max_letters}"
                )
            if not 0 <= self.forgetful <= 1:
                raise ValueError(f"task.forgetful must be in [0, 1]; got {self.forgetful}")

    config: Config

    @tool
    def spell(self, word: str) -> str:
        """Spell a word of lower-case letters in the radio alphabet."""
        if not word or any(letter not in WORDS for letter in word):
            raise ArgumentsError(f"expected lower-case letters a to z; got {word!r}")
        return " ".join(WORDS[letter] for letter in word)

    def question(self, rng: random.Random) -> str:
        letters = rng.randint(self.config.min_letters, self.config.max_letters)
        return "".join(rng.sample(list(WORDS), letters))

    def expected(self, question: str) -> str:
        return self.spell(question)

    def demonstration(self, example: Example, rng: random.Random) -> list[Message]:
        """A tool call and an answer that often leaves out the last of many words."""
        question = example.messages[-1]["content"]
        said = self.spell(question)
        words = said.split()
        if len(words) >= 4 and rng.random() < self.config.forgetful:
            words.pop()
        call: dict[str, Any] = {"name": "spell", "arguments": {"word": question}}
        return [
            {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
            {"role": "tool", "name": "spell", "content": said},
            {"role": "assistant", "content": f"[ANSWER] {' '.join(words)}"},
        ]
