"""A task of your own: continue letters so that they read the same backwards: "abc" → "abccba".

torchtitan-rl train --module examples/custom_task.py --config palindromes_tiny
"""

from dataclasses import dataclass, replace

from torchtitan_rl import RunConfig
from torchtitan_rl.recipes import grpo_sum_digits_tiny
from torchtitan_rl.tasks.questions import QuestionTask


class Palindromes(QuestionTask):  # which holds out a tenth of the questions for evaluation
    @dataclass(kw_only=True, slots=True)
    class Config(QuestionTask.Config):
        name: str = "palindromes"

    def question(self, rng):
        return "".join(rng.sample("abcdefghijklmnopqrstuvwxyz", 3))

    def expected(self, question):
        return question  # what the text must start with

    def reward(self, completions, expected_answer):
        """1 and more counts as correct; a text that ends as it begins gets 0.1."""
        texts = [completion.text for completion in completions]
        right = [t.startswith(expected_answer) and t == t[::-1] for t in texts]
        return [r + 0.1 * (t[:1] == t[-1:]) for r, t in zip(right, texts, strict=True)]

    def demonstration(self, example, rng):
        """Only for a warm start of the tiny model: the letters, and again in any order."""
        letters = example.messages[-1]["content"]
        return letters + "".join(rng.sample(letters, 3))


def palindromes_tiny() -> RunConfig:
    """Palindromes, from a model that repeats letters in any order."""
    return replace(grpo_sum_digits_tiny(), task=Palindromes.Config())
