"""Calculator and spelling: their tools, their teachers, and that the two fit together."""

import random
import re

import pytest

from torchtitan_rl.core.types import Completion, Rollout
from torchtitan_rl.tasks.calculator import Calculator
from torchtitan_rl.tasks.spelling import WORDS, Spelling


def calculator(**settings):
    return Calculator.Config(**settings).build(seed=3)


def spelling(**settings):
    return Spelling.Config(**settings).build(seed=3)


def score(task, text, expected):
    rollout = Rollout([Completion(0, 0, [1], text, [2])], [], "finished")
    [reward] = task.reward([rollout], expected)
    return reward


def question(example):
    return example.messages[-1]["content"]


def taught(task, count=300):
    for index in range(count):
        example = task.train_example(index)
        yield example, task.demonstration(example, random.Random(index))


@pytest.mark.parametrize(
    ("expression", "result"),
    [("47+85", "132"), ("132-12", "120"), (" 1 + 2 ", "3"), ("-5+3", "-2"), ("0-7", "-7")],
)
def test_the_calculator_does_one_operation(expression, result):
    state = {"operations": 2}
    assert calculator().calculator(expression, state=state) == result
    assert state == {"operations": 3}


@pytest.mark.parametrize(
    "expression", ["", "1", "1+2+3", "1*2", "__import__('os')", "9" * 99 + "+1", "1+-2"]
)
def test_the_calculator_refuses_everything_else(expression):
    state = {}
    with pytest.raises(ValueError, match="expected two whole numbers"):
        calculator().calculator(expression, state=state)
    assert state == {}


def test_questions_are_answered_by_their_operations():
    for task in (calculator(), calculator(min_operations=1, max_operations=4, digits=3)):
        counts = set()
        for index in range(200):
            example = task.train_example(index)
            assert example.expected_answer == str(eval(question(example)))
            numbers = re.findall(r"\d+", question(example))
            assert {len(number) for number in numbers} == {task.config.digits}
            counts.add(len(numbers) - 1)
        assert counts == set(range(task.config.min_operations, task.config.max_operations + 1))


def test_the_teacher_calls_the_tool_and_hears_its_answers():
    task = calculator()
    for _, messages in taught(task):
        *calls, last = messages
        assert last["content"].startswith("[ANSWER] ")
        for asked, told in zip(calls[::2], calls[1::2], strict=True):
            [call] = asked["tool_calls"]
            arguments = task.tools["calculator"].arguments(call["function"]["arguments"])
            assert told["content"] == task.calculator(**arguments, state={})
        assert last["content"] == f"[ANSWER] {calls[-1]['content']}"


@pytest.mark.parametrize("hasty", [0.0, 0.7, 1.0])
def test_the_teacher_is_hasty_before_subtractions_only(hasty):
    mistakes, chances = 0, 0
    for example, messages in taught(calculator(hasty=hasty), 1500):
        right = score(calculator(), messages[-1]["content"], example.expected_answer).correct
        later = re.findall(r"[+-]", question(example))[1:]
        if "-" in later:
            chances, mistakes = chances + 1, mistakes + (not right)
        else:
            assert right
    assert mistakes / chances == pytest.approx(hasty, abs=0.05)


def test_spelling_knows_every_letter():
    assert len(WORDS) == 26
    assert all(word[0] == letter for letter, word in WORDS.items())
    assert spelling().spell("cab") == "charlie alfa bravo"
    for word in ("", "Cab", "a b", "é"):
        with pytest.raises(ValueError, match="expected lower-case letters"):
            spelling().spell(word)


@pytest.mark.parametrize("forgetful", [0.0, 0.7, 1.0])
def test_the_teacher_forgets_the_last_of_many_words(forgetful):
    mistakes, chances = 0, 0
    for example, messages in taught(spelling(forgetful=forgetful), 1500):
        asked, told, last = messages
        assert asked["tool_calls"][0]["function"]["arguments"] == {"word": question(example)}
        assert told["content"] == example.expected_answer
        right = score(spelling(), last["content"], example.expected_answer).correct
        if len(question(example)) >= 4:
            chances, mistakes = chances + 1, mistakes + (not right)
        else:
            assert right
    assert mistakes / chances == pytest.approx(forgetful, abs=0.05)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[ANSWER] 120", 1.1),
        ("so [ANSWER] 3 no [ANSWER] 120 ", 1.1),
        ("[ANSWER] 0120", 0.1),
        ("[ANSWER] 121", 0.1),
        ("120", 0.0),
        ("[ANSWER] ", 0.0),
        ("[ANSWER]120", 0.0),
        ("", 0.0),
    ],
)
def test_rewards(text, value):
    assert score(calculator(), text, "120").value == pytest.approx(value)


@pytest.mark.parametrize("task", [calculator(), spelling()], ids=["calculator", "spelling"])
def test_heldout_questions_are_never_trained_on(task):
    heldout = {question(example) for example in task.heldout_examples(150)}
    assert len(heldout) == 150
    assert not heldout & {question(task.train_example(i)) for i in range(-1000, 2000)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Calculator.Config(min_operations=0), "min_operations must be at least 1"),
        (lambda: Calculator.Config(max_operations=1), "at most task.max_operations; got 2 and 1"),
        (lambda: Calculator.Config(digits=10), "task.digits must be 1 to 9"),
        (lambda: Calculator.Config(hasty=1.5), "task.hasty must be in"),
        (lambda: Calculator.Config(heldout_share=0.0), "heldout_share must be in"),
        (lambda: Spelling.Config(min_letters=0), "min_letters must be at least 1"),
        (lambda: Spelling.Config(max_letters=27), "at most 26; got 2 and 27"),
        (lambda: Spelling.Config(forgetful=-0.1), "task.forgetful must be in"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
