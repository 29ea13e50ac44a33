"""Task made of a file of questions and answers, one JSON object per line; needs no code."""

import hashlib
import os
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from torchtitan_rl.core.types import Rollout
from torchtitan_rl.tasks.answers import AnswerReward, last_number
from torchtitan_rl.tasks.question_file import (
    Question,
    QuestionFileError,
    check_text,
    read_questions,
)
from torchtitan_rl.tasks.task import Example, Reward, Task, is_heldout


class Jsonl(Task):
    """Questions of a file, shuffled anew in every epoch.

    The file is read when the first example is needed, so only by the process that makes examples: a
    grader on another machine needs no file.

    Example:
        Jsonl.Config(path="sums.jsonl", reward=AnswerReward(name="numeric", marker="Answer:"))
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        name: str = "jsonl"
        path: str = ""
        """File with one JSON object per line; relative to the folder in which the run is
        started."""
        question_field: str = "question"
        """Field of a line with the question."""
        answer_field: str = "answer"
        """Field of a line with the expected answer."""
        instructions: str = ""
        """System message; none if it is empty."""
        reward: AnswerReward = field(default_factory=AnswerReward)
        """How the answer is found in a completion, and what it is worth."""
        heldout_path: str = ""
        """File of questions for evaluation; none of them is trained on, whichever file it is in."""
        heldout_share: float = 0.1
        """Share of all questions that is kept for evaluation, if there is no file for it."""

        def __post_init__(self) -> None:
            # Made absolute here, in the process that the user has started: others may run
            # elsewhere.
            for name in ("path", "heldout_path"):
                if given := getattr(self, name):
                    setattr(self, name, os.path.abspath(os.path.expanduser(given)))
            if not 0 < self.heldout_share < 1:
                raise ValueError(f"task.heldout_share must be in (0, 1); got {self.heldout_share}")
            if not self.question_field or not self.answer_field:
                raise ValueError("task.question_field and task.answer_field need a name each")
            if self.question_field == self.answer_field:
                raise ValueError(
                    f"task.question_field and task.answer_field are both {self.answer_field!r}: "
                    "the model would see the answer"
                )

    config: Config

    def check(self) -> None:
        super().check()
        self._try_reward(self._train[0])

    def train_example(self, index: int) -> Example:
        epoch, position = divmod(index, len(self._train))
        order = shuffled(len(self._train), f"{self.seed}/{self.name}/{epoch}")
        return self._example(self._train[order[position]])

    def heldout_examples(self, count: int) -> list[Example]:
        return [self._example(question) for question in self._heldout[:count]]

    def all_examples(self) -> Iterator[tuple[str, Example]]:
        for question in self._train:
            yield f"{self.config.path}, line {question.line}", self._example(question)
        for question in self._heldout:
            yield f"{self._heldout_name}, line {question.line}", self._example(question)

    def reward(self, completions: Sequence[Rollout], expected_answer: Any) -> list[Reward]:
        return [self.config.reward(c.text, expected_answer) for c in completions]

    @property
    def _heldout_name(self) -> str:
        return self.config.heldout_path or self.config.path

    def _example(self, question: Question) -> Example:
        messages = [{"role": "user", "content": question.text}]
        if self.config.instructions:
            messages.insert(0, {"role": "system", "content": self.config.instructions})
        return Example(messages, expected_answer=question.answer)

    @property
    def _train(self) -> list[Question]:
        return self._split[0]

    @property
    def _heldout(self) -> list[Question]:
        return self._split[1]

    @cached_property
    def _split(self) -> tuple[list[Question], list[Question]]:
        """Questions to train on, in the file's order, and held-out questions, in a fixed order."""
        path, share = self.config.path, self.config.heldout_share
        if not path:
            raise QuestionFileError(
                f"task {self.name!r} has no file: set its path, as in --task.path my.jsonl"
            )
        questions = self._read(path)
        if self.config.heldout_path:
            heldout = {q.text: q for q in reversed(self._read(self.config.heldout_path))}
        else:
            heldout = {q.text: q for q in reversed(questions) if is_heldout(q.text, share)}
        # By their text: a question that is in the file twice must not be on both sides.
        train = [question for question in questions if question.text not in heldout]
        self._check_split(train, list(heldout), questions)
        return train, sorted(heldout.values(), key=lambda question: _rank(question.text))

    def _read(self, path: str) -> list[Question]:
        return read_questions(
            path,
            question_field=self.config.question_field,
            answer_field=self.config.answer_field,
            check_answer=self._check_answer,
        )

    def _check_answer(self, answer: Any) -> None:
        reward = self.config.reward
        if reward.own:
            return
        check_text(answer)
        if reward.name == "numeric" and last_number(str(reward.expected(answer))) is None:
            raise ValueError(f"the answer {answer!r} has no number (task.reward.name is numeric)")

    def _check_split(self, train: list, heldout: list, questions: list) -> None:
        path = self.config.path
        if self.config.heldout_path:
            if not train:
                raise QuestionFileError(
                    f"all questions of {path} are also in {self.config.heldout_path}, so none is "
                    "left to train on; give two files that differ"
                )
        elif not train or not heldout:
            both = "trained on" if not train else "held out"
            raise QuestionFileError(
                f"{path} has too few lines ({len(questions)}): none of them would be {both}; add "
                "lines, change task.heldout_share, or give task.heldout_path"
            )

    def _try_reward(self, question: Question) -> None:
        """Call a reward function of the user's once, before any process starts."""
        reward = self.config.reward
        if reward.own:
            try:
                reward.compare(str(question.answer), question.answer)
            except ValueError as error:
                where = f"tried on the answer of {self.config.path}, line {question.line}"
                raise ValueError(f"{error} ({where})") from error


@lru_cache(maxsize=8)  # an epoch and its neighbour, of each task of a mixture
def shuffled(count: int, key: str) -> "array[int]":
    """The numbers below `count`, in an order that depends on the key alone.

    Example:
        >>> sorted(shuffled(5, "0/jsonl/0"))
        [0, 1, 2, 3, 4]
    """
    order = array("q", range(count))
    random.Random(key).shuffle(order)
    return order


def _rank(question: str) -> bytes:
    """Sort key of held-out questions: depends on the question, not on its position in a file."""
    return hashlib.blake2b(question.encode(), digest_size=8, salt=b"evaluation").digest()
