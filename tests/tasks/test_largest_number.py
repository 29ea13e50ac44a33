"""The largest of some numbers: questions and their answers, rewards by table, bad settings."""

import re

import pytest

from torchtitan_rl.core.types import Completion
from torchtitan_rl.tasks.largest_number import LargestNumber


def task(**settings):
    return LargestNumber.Config(**settings).build(seed=0)


@pytest.mark.parametrize(("numbers", "digits"), [(2, 1), (9, 1), (4, 2), (3, 5)])
def test_a_question_lists_different_numbers_and_expects_the_largest(numbers, digits):
    largest = task(numbers=numbers, digits=digits)
    for index in range(50):
        example = largest.train_example(index)
        listed = [int(n) for n in re.findall(r"\d+", example.messages[-1]["content"])]
        assert len(set(listed)) == numbers
        assert {len(str(n)) for n in listed} == {digits}
        assert example.expected_answer == max(listed)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("The largest number is 63.", 1.1),
        ("63", 1.1),
        ("**63**", 0.0),
        ("The largest number is 59.", 0.1),
        ("63 is the largest number", 0.0),
        ("The largest number is 63. It", 0.0),
        ("It is -63", 0.0),
        ("It is 1.63", 0.0),
        ("", 0.0),
    ],
)
def test_a_completion_ends_in_the_answer(text, reward):
    completion = Completion(0, 0, [1], text, [2], token_logprobs=[-1.0])
    [found] = task().reward([completion], 63)
    assert found.value == pytest.approx(reward)
    assert found.correct == (reward > 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"numbers": 1}, r"task.numbers must be at least 2 .* got 1"),
        ({"numbers": 10, "digits": 1}, r"at most 9, the numbers of task.digits 1; got 10"),
        ({"digits": 0}, r"task.digits must be at least 1; got 0"),
        ({"answer": r"\d+"}, r"task.answer .* has 0 groups"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        LargestNumber.Config(**settings)
