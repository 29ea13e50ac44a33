"""Rewards of answers: find the answer in a completion, and compare it with the expected one."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any

from torchtitan_rl.core.errors import describe_error
from torchtitan_rl.core.plugins import check_arguments, resolve
from torchtitan_rl.core.settings import checks_numbers, is_number
from torchtitan_rl.tasks.task import Reward

RewardFn = Callable[..., "Reward | float"]

LONGEST_NUMBER = 400
"""Most characters of a number: Python takes long to read much longer ones."""

_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(
    # A minus after a word, a digit or a bracket is a hyphen or a subtraction: 10-20, (a)-3.
    r"(?:(?<![\w)\]}^.])[-−+])?"
    # Not within a word or an exponent: the number in "12 m2" and "12 m^-2" is 12.
    r"(?<![A-Za-z0-9_^])(?<!\^[-−])"
    # A fraction, unless it is a date; else an exponent may follow that is short enough to compute.
    rf"(?:(?<!/){_DECIMAL}/[0-9]+(?![/0-9]|\.[0-9])|{_DECIMAL}(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?)"
)


def last_number(text: str) -> Fraction | None:
    """The last number in a text, exactly; commas separate thousands, units are ignored.

    Example:
        >>> last_number("So 3 boxes cost $1,234.50.")
        Fraction(2469, 2)
        >>> last_number("it is -3/4 m^2")
        Fraction(-3, 4)
        >>> last_number("none") is None
        True
    """
    written = _NUMBER.findall(text)[-1:]
    if not written or len(written[0]) > LONGEST_NUMBER:
        return None
    above, _, below = written[0].replace(",", "").replace("−", "-").partition("/")
    return Fraction(above) / int(below or 1) if int(below or 1) else None


def exact(answer: str, expected: Any, *, ignore_case: float = 0) -> float:
    """1 if both texts are equal, apart from surrounding white space; `ignore_case 1` ignores
    case."""
    said, wanted = answer.strip(), str(expected).strip()
    return float(said.casefold() == wanted.casefold() if ignore_case else said == wanted)


def numeric(answer: str, expected: Any, *, tolerance: float = 1e-6, relative: float = 0.0) -> float:
    """1 if the last numbers of both texts differ by at most `tolerance`, or by the share `relative`
    of the expected one."""
    said, wanted = last_number(answer), last_number(str(expected))
    if said is None or wanted is None:
        return 0.0
    return float(abs(said - wanted) <= max(Fraction(tolerance), Fraction(relative) * abs(wanted)))


REWARDS: dict[str, RewardFn] = {"exact": exact, "numeric": numeric}


@checks_numbers
@dataclass(kw_only=True, slots=True)
class AnswerReward:
    """Finds the answer in a completion and compares it with the expected one: 1 if it is right.

    Example:
        >>> AnswerReward(name="numeric", marker="Answer:")("6 x 7. Answer: 42 km", "42").value
        1.0
    """

    name: str = "exact"
    """exact, numeric, or `package.module:function` of your own: it takes the answer and the
    expected one, and returns a number, or a Reward."""
    kwargs: dict[str, float | str] = field(default_factory=dict)
    """Keyword arguments of the function: `ignore_case 1` of exact, `tolerance 0.01` or
    `relative 0.01` of numeric."""
    marker: str = ""
    """Text before the answer, such as `Answer:`; the answer is the first line after the last one.
    Empty: the answer is the whole completion."""
    pattern: str = ""
    """Regular expression of the answer, in place of a marker; the last match counts, or its group
    if it has one."""
    format_reward: float = 0.0
    """Additional reward for an answer in the required form, right or wrong."""

    def __post_init__(self) -> None:
        function = resolve(self.name, REWARDS, what="reward")
        check_arguments(self.name, function, self.kwargs, what="reward", positional=2)
        for name in ("tolerance", "relative", "ignore_case"):
            value = self.kwargs.get(name, 0.0)
            if name == "ignore_case" and isinstance(value, bool):
                continue  # a switch, which the command line can only give as a number
            if self.name in REWARDS and not (is_number(value) and 0 <= value < 1e308):
                raise ValueError(
                    f"{name} of task.reward.kwargs must be a number from 0 up; got {value!r}"
                )
        if self.marker and self.pattern:
            raise ValueError("task.reward.marker and task.reward.pattern exclude each other")
        check_pattern(self.pattern, setting="task.reward.pattern")
        if not 0 <= self.format_reward < math.inf:
            raise ValueError(
                f"task.reward.format_reward must be 0 or more; got {self.format_reward}"
            )
        if self.format_reward and not (self.marker or self.pattern or self.name == "numeric"):
            raise ValueError(
                "task.reward.format_reward: any text has the form that is asked for; set "
                "task.reward.marker or task.reward.pattern"
            )

    @property
    def own(self) -> bool:
        """Whether the reward is a function of the user's."""
        return self.name not in REWARDS

    def find(self, text: str) -> str | None:
        """The answer in a text, or None if there is none in the required form."""
        found = self._located(text)
        if found is not None and self.name == "numeric" and last_number(found) is None:
            return None
        return found

    def expected(self, answer: Any) -> Any:
        """The expected answer in a file's text, found like an answer of the model where the text
        has that form: many files have the working, a marker, and then the answer."""
        if not isinstance(answer, str) or self.own:
            return answer
        return self._located(answer) or answer

    def _located(self, text: str) -> str | None:
        if self.marker:
            _, marker, after = text.rpartition(self.marker)
            return next(iter(after.strip().splitlines()), "").strip() or None if marker else None
        return last_match(self.pattern, text) if self.pattern else text.strip()

    def __call__(self, text: str, expected: Any) -> Reward:
        """Reward of a completion; 0 if it has no answer in the required form."""
        answer = self.find(text)
        if answer is None:
            return Reward(0.0, False, {self.part: 0.0, "format": 0.0})
        worth = self.compare(answer, expected)
        parts = {**worth.parts, "format": self.format_reward}
        return Reward(worth.value + self.format_reward, worth.correct, parts)

    def compare(self, answer: str, expected: Any) -> Reward:
        """Reward of an answer without the part for its form; an error names function and line."""
        function = resolve(self.name, REWARDS, what="reward")
        try:
            worth = function(answer, self.expected(expected), **self.kwargs)
        except Exception as error:
            said = describe_error(error, self.name.partition(":")[0])
            raise ValueError(f"reward {self.name!r} raised {said}") from error
        if isinstance(worth, Reward):
            return worth
        if not isinstance(worth, bool | int | float) or not math.isfinite(worth):
            raise ValueError(f"reward {self.name!r} returned {worth!r}; expected a finite number")
        return Reward(float(worth), worth >= 1.0, {self.part: float(worth)})

    @property
    def part(self) -> str:
        """Name of this part of the reward in the log."""
        return self.name.rpartition(":")[2]


@lru_cache(maxsize=16)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def check_pattern(pattern: str, *, setting: str, needs_group: bool = False) -> None:
    """Refuse a pattern with which `last_match` could not find a single answer."""
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"{setting} {pattern!r} is no regular expression: {error}") from error
    if groups > 1 or (needs_group and not groups):
        raise ValueError(
            f"{setting} {pattern!r} has {groups} groups; mark the answer with one, and write the "
            "others as (?:...)"
        )


def last_match(pattern: str, text: str) -> str | None:
    """The last match of a pattern, or its group if it has one; None if there is none.

    Example:
        >>> last_match(r"= (\\d+)", "6 + 8 = 14, 14 + 1 = 15.")
        '15'
    """
    found = None
    for match in _compiled(pattern).finditer(text):
        found = match[match.re.groups]
    return found.strip() or None if found else None
