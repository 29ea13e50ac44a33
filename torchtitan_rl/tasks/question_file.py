"""Reading files of questions, one JSON object per line; one error names all bad lines."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.core.plugins import nearest

MOST_PROBLEMS = 10
"""Most bad lines that an error names; the others are counted."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class QuestionFileError(TorchtitanRLError, ValueError):
    """A file of questions cannot be used; the message names it, its bad lines and the fix."""


@dataclass(slots=True, frozen=True)
class Question:
    """One line of a file of questions."""

    text: str
    answer: Any
    line: int


def read_questions(
    path: str | Path,
    *,
    question_field: str,
    answer_field: str,
    check_answer: Callable[[Any], None],
) -> list[Question]:
    """All questions of a file, or an error that names its bad lines. Empty lines are ignored.

    `check_answer` raises a ValueError for an answer that no completion could match.

    Example:
        >>> questions = read_questions("sums.jsonl", question_field="question",
        ...     answer_field="answer", check_answer=check_text)             # doctest: +SKIP
        >>> questions[0]                                                     # doctest: +SKIP
        Question(text='What is 2 + 3?', answer='5', line=1)
    """
    questions: list[Question] = []
    problems: list[str] = []
    bad = 0
    for number, line in _lines(Path(path)):
        try:
            text, answer = _fields(_decoded(line), question_field, answer_field)
            check_answer(answer)
            questions.append(Question(text, answer, number))
        except ValueError as error:
            bad += 1
            if len(problems) < MOST_PROBLEMS:
                problems.append(f"  line {number}: {error}")
    if bad:
        if bad > len(problems):
            problems.append(f"  and {bad - len(problems)} more")
        count = f"{bad} bad line{'s' if bad > 1 else ''} of {bad + len(questions)}"
        raise QuestionFileError("\n".join([f"{path} has {count}:", *problems]))
    if not questions:
        raise QuestionFileError(f"{path} is empty: it needs a JSON object on every line")
    return questions


def check_text(answer: Any) -> None:
    """Refuse an answer that is neither text nor a number."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(
            f"the answer is {_kind(answer)}; expected text or a number (only a reward of your own "
            "can take anything else)"
        )
    if not str(answer).strip():
        raise ValueError("the answer is empty")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    if path.is_dir():
        raise QuestionFileError(f"{path} is a folder: give a file of JSON lines")
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
                if line := line.strip():
                    yield number, line
    except FileNotFoundError as error:
        raise QuestionFileError(f"there is no file {path}") from error
    except OSError as error:
        raise QuestionFileError(f"{path} cannot be read: {error.strerror}") from error


def _decoded(line: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(line)
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except msgspec.DecodeError as error:
        if line in (b"[", b"{"):
            raise ValueError("one JSON object on every line is needed, not one over many") from None
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"it is {_kind(value)}; expected an object such as {{...}}")
    return value


def _fields(line: dict[str, Any], question_field: str, answer_field: str) -> tuple[str, Any]:
    for name, setting in ((question_field, "question_field"), (answer_field, "answer_field")):
        if name not in line:
            raise ValueError(f"it has no field {name!r}; {nearest(name, line)} (task.{setting})")
        if line[name] is None:
            raise ValueError(f"its field {name!r} is null")
    question = line[question_field]
    if not isinstance(question, str):
        raise ValueError(f"the question is {_kind(question)}; expected text")
    if not question.strip():
        raise ValueError("the question is empty")
    return question, line[answer_field]


def _kind(value: Any) -> str:
    """Name of a JSON value's type."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list():
            return "a list"
    return "an object"
