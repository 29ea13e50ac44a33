"""Answers: found by marker, pattern or as the last number, and compared; settings that do nothing
are refused."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.tasks.answers import AnswerReward, exact, last_number, numeric


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42),
        ("It costs $1,234.50.", Fraction(2469, 2)),
        ("1,234,567 people", 1_234_567),
        ("12,34", 34),
        ("1,2345", 2345),
        ("1, 2, 3", 3),
        ("first 5, then 7 apples", 7),
        ("-3", -3),
        ("−3 °C", -3),
        ("+3", 3),
        ("x=-3", -3),
        ("(-3)", -3),
        ("5-3", 3),
        ("(5)-3", 3),
        ("10–20", 20),
        ("COVID-19", 19),
        ("12 m2", 12),
        ("12 m^2", 12),
        ("12 m^-2", 12),
        ("12 m²", 12),
        ("12kg", 12),
        ("50%", 50),
        (".5", Fraction(1, 2)),
        ("Rs.42", 42),
        ("0.10", Fraction(1, 10)),
        ("42.", 42),
        ("**42**", 42),
        ("\\boxed{42}", 42),
        ("$42$", 42),
        ("3/4", Fraction(3, 4)),
        ("-3/4 of it", Fraction(-3, 4)),
        ("3/4/2021", 2021),
        ("1.5/2", Fraction(3, 4)),
        ("1,000/8", 125),
        ("1/2.5", Fraction(5, 2)),
        ("10/2=5", 5),
        ("1/0", None),
        ("1e3", 1000),
        ("2.5E-1", Fraction(1, 4)),
        ("007", 7),
        ("", None),
        ("none", None),
        ("x2", None),
        ("m25", None),
        ("٣", None),
        ("9" * 400, 10**400 - 1),
        ("9" * 401, None),
        ("9" * 100_000, None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_last_number(text, number):
    assert last_number(text) == number


@given(st.integers(), st.text(alphabet="abc .,:$€%\n"))
def test_a_number_is_found_however_it_is_written(number, unit):
    # A comma or a dot, and then text without a digit, belongs to the sentence.
    for written in (str(number), f"{number:,}", f"{number}.0"):
        assert last_number(f"it is {written} {unit}") == number


@given(st.text())
def test_any_text_has_a_number_or_none(text):
    number = last_number(text)
    assert number is None or last_number(f"{text} ") == number


@pytest.mark.parametrize(
    ("answer", "expected", "kwargs", "worth"),
    [
        ("Paris", "Paris", {}, 1),
        (" Paris\n", "Paris ", {}, 1),
        ("paris", "Paris", {}, 0),
        ("paris", "Paris", {"ignore_case": 1}, 1),
        ("STRASSE", "straße", {"ignore_case": 1}, 1),
        ("Paris.", "Paris", {}, 0),
        ("", "Paris", {}, 0),
        ("42", 42, {}, 1),
        ("0.1", 0.1, {}, 1),
    ],
)
def test_exact(answer, expected, kwargs, worth):
    assert exact(answer, expected, **kwargs) == worth


@pytest.mark.parametrize(
    ("answer", "expected", "kwargs", "worth"),
    [
        ("42", "42", {}, 1),
        ("so 42 km", "42", {}, 1),
        ("1,000", 1000, {}, 1),
        ("2.50", 2.5, {}, 1),
        ("1/3", "0.3333333", {}, 1),
        ("0.33", "1/3", {}, 0),
        ("0.33", "1/3", {"tolerance": 0.01}, 1),
        ("1.005", "1", {"tolerance": 0.005}, 1),
        ("1.0051", "1", {"tolerance": 0.005}, 0),
        ("6.0e23", 6.02e23, {"relative": 0.01}, 1),
        ("5.9e23", 6.02e23, {"relative": 0.01}, 0),
        ("90071992547409931", "90071992547409930", {}, 0),  # no doubles: these would be equal
        ("-42", "42", {}, 0),
        ("42 or 43", "42", {}, 0),
        ("no idea", "42", {}, 0),
        ("6 x 7 = 42", "working: 6 x 7\n#### 42", {}, 1),
    ],
)
def test_numeric(answer, expected, kwargs, worth):
    assert numeric(answer, expected, **kwargs) == worth


MARKER = {"marker": "Answer:"}
BOXED = {"pattern": r"boxed\{(.*?)\}"}


@pytest.mark.parametrize(
    ("settings", "text", "found"),
    [
        ({}, " all of it\n", "all of it"),
        ({}, "", ""),
        (MARKER, "Let me see. Answer: 42", "42"),
        (MARKER, "Answer: 41. No, Answer: 42 ", "42"),
        (MARKER, "Answer:\n\n 42\nI hope this helps.", "42"),
        (MARKER, "Answer:", None),
        (MARKER, "Answer: \n ", None),
        (MARKER, "answer: 42", None),
        (MARKER, "", None),
        (BOXED, r"so \boxed{41}, or \boxed{42}.", "42"),
        (BOXED, r"\boxed{}", None),
        (BOXED, "42", None),
        ({"pattern": "yes|no"}, "no, yes, no!", "no"),
        ({"name": "numeric"}, "42 km", "42 km"),
        ({"name": "numeric"}, "no idea", None),
        ({"name": "numeric", **MARKER}, "7 apples. Answer: many", None),
    ],
)
def test_the_answer_is_found_where_it_is_said_to_be(settings, text, found):
    assert AnswerReward(**settings).find(text) == found


@pytest.mark.parametrize(
    ("settings", "text", "expected", "value", "correct"),
    [
        (MARKER, "Answer: Paris", "Paris", 1.0, True),
        (MARKER, "Paris", "Paris", 0.0, False),
        ({**MARKER, "format_reward": 0.1}, "Answer: Paris", "Paris", 1.1, True),
        ({**MARKER, "format_reward": 0.1}, "Answer: Rome", "Paris", 0.1, False),
        ({**MARKER, "format_reward": 0.1}, "Rome", "Paris", 0.0, False),
        ({"marker": "####"}, "I say #### 42", "6 x 7\n#### 42", 1.0, True),
        ({"name": "numeric", "format_reward": 0.1}, "42 km", 42, 1.1, True),
        ({"name": "numeric", "format_reward": 0.1}, "far", 42, 0.0, False),
    ],
)
def test_the_reward_of_a_completion(settings, text, expected, value, correct):
    reward = AnswerReward(**settings)(text, expected)
    assert (reward.value, reward.correct) == (pytest.approx(value), correct)
    assert sum(reward.parts.values()) == pytest.approx(value)
    assert reward.parts.keys() == {settings.get("name", "exact"), "format"}


@given(st.text(), st.text(min_size=1))
def test_what_was_expected_is_right_behind_the_marker(working, answer):
    reward = AnswerReward(marker="Answer:")
    if (found := reward.find(f"Answer: {answer}")) is not None:
        assert reward(f"{working} Answer: {answer}", found).correct


MINE = """
from torchtitan_rl.tasks.task import Reward

def shorter(answer, expected, *, letters=3):
    return len(answer) <= letters

def partly(answer, expected):
    return Reward(0.5, correct=answer in expected, parts={"half": 0.5})

def raises(answer, expected):
    return expected["tests"]

def words(answer, expected):
    return "good"

def alone(answer):
    return 1.0
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "answers_of_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("settings", "text", "value", "correct", "parts"),
    [
        ({"name": "shorter"}, "ab", 1.0, True, {"shorter": 1.0, "format": 0.0}),
        ({"name": "shorter", "kwargs": {"letters": 1.0}}, "ab", 0.0, False, None),
        ({"name": "partly"}, "a", 0.5, True, {"half": 0.5, "format": 0.0}),
        ({"name": "shorter", **MARKER}, "ab", 0.0, False, None),
        ({"name": "shorter", **MARKER}, "much longer. Answer: ab", 1.0, True, None),
    ],
)
def test_a_reward_of_ones_own(mine, settings, text, value, correct, parts):
    settings = settings | {"name": f"answers_of_mine:{settings['name']}"}
    reward = AnswerReward(**settings)(text, ["a"])
    assert (reward.value, reward.correct) == (value, correct)
    assert parts is None or reward.parts == parts


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"'answers_of_mine:raises' raised TypeError.*answers_of_mine\.py:11"),
        ("words", "'answers_of_mine:words' returned 'good'; expected a finite number"),
    ],
)
def test_an_error_in_a_reward_of_ones_own_names_it(mine, name, message):
    with pytest.raises(ValueError, match=message):
        AnswerReward(name=f"answers_of_mine:{name}")("a", "b")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "exakt"}, "unknown reward 'exakt'; did you mean 'exact'"),
        ({"name": "nowhere:f"}, "reward 'nowhere:f': cannot import 'nowhere'"),
        ({"name": "answers_of_mine:alone"}, "cannot take kwargs.*too many positional"),
        ({"kwargs": {"tolerance": 0.1}}, "'exact' cannot take kwargs.*it takes ignore_case"),
        ({"name": "numeric", "kwargs": {"tolerance": -1.0}}, "tolerance.*from 0 up; got -1"),
        ({"name": "numeric", "kwargs": {"relative": "x"}}, "relative.*from 0 up; got 'x'"),
        ({"name": "numeric", "kwargs": {"tolerance": float("nan")}}, "from 0 up; got nan"),
        ({"kwargs": {"ignore_case": "yes"}}, "ignore_case.*from 0 up; got 'yes'"),
        ({"marker": "A", "pattern": "B"}, "exclude each other"),
        ({"pattern": "("}, r"task\.reward\.pattern '\(' is no regular expression"),
        ({"pattern": "(a)(b)"}, r"has 2 groups; mark the answer with one"),
        ({"format_reward": 0.1}, "any text has the form.*set task.reward.marker"),
        ({"format_reward": -0.1, **MARKER}, "format_reward must be 0 or more; got -0.1"),
        ({"format_reward": float("nan"), **MARKER}, "format_reward must be 0 or more"),
    ],
)
def test_settings_that_cannot_work_are_refused(mine, settings, message):
    with pytest.raises(ValueError, match=message):
        AnswerReward(**settings)
