"""Sums of digits: splits that never meet, rewards by table, demonstrations of the form."""

import random
import re
from dataclasses import dataclass

import cloudpickle
import pytest

from torchtitan_rl.core.types import Completion
from torchtitan_rl.tasks.sum_digits import SumDigits
from torchtitan_rl.tasks.task import Example, Task, is_heldout


def task(seed=0, **settings):
    return SumDigits.Config(**settings).build(seed=seed)


def question(example):
    return example.messages[-1]["content"]


def rewards(texts, expected, **settings):
    completions = [Completion(0, 0, [1], text, [2], token_logprobs=[-1.0]) for text in texts]
    return task(**settings).reward(completions, expected)


@pytest.mark.parametrize("seed", [0, 1, 17])
@pytest.mark.parametrize("max_numbers", [2, 4])
def test_train_and_heldout_questions_never_overlap(seed, max_numbers):
    sums = task(seed, max_numbers=max_numbers)
    # Negative indices are the demonstrations'.
    train = {question(sums.train_example(index)) for index in range(-2000, 5000)}
    heldout = {question(example) for example in sums.heldout_examples(500)}
    assert len(train) > 3000
    assert not train & heldout


@pytest.mark.parametrize("index", [-7, 0, 3, 10**9])
def test_a_train_example_is_a_function_of_seed_and_index(index):
    one, again = task(seed=4), task(seed=4)
    again.train_example(99)
    assert one.train_example(index) == again.train_example(index)
    assert one.train_example(index) == one.train_example(index)


def test_other_seeds_and_other_indices_give_other_questions():
    def stream(seed):
        return [question(task(seed).train_example(index)) for index in range(100)]

    assert stream(0) != stream(1)
    assert len(set(stream(0))) > 90


def test_heldout_examples_are_distinct_and_the_same_for_every_seed():
    examples = task(seed=0).heldout_examples(300)
    assert examples == task(seed=9).heldout_examples(300)
    assert len({question(example) for example in examples}) == 300
    assert examples[:50] == task().heldout_examples(50)


def test_a_question_has_the_configured_numbers_and_the_sum_as_its_answer():
    sums = task(min_numbers=1, max_numbers=3, digits=3)
    counts = set()
    for index in range(300):
        example = sums.train_example(index)
        numbers = question(example).split()
        counts.add(len(numbers))
        assert all(re.fullmatch(r"[1-9]\d\d", number) for number in numbers)
        assert example.messages[-1]["role"] == "user"
        assert example.expected_answer == sum(int(d) for number in numbers for d in number)
    assert counts == {1, 2, 3}


def test_more_heldout_questions_than_there_are_is_an_error_that_says_what_to_change():
    with pytest.raises(ValueError, match=r"fewer than 60 held-out.*evaluation\.prompts") as error:
        task(min_numbers=1, max_numbers=1, heldout_share=0.5).heldout_examples(60)
    found = sum(is_heldout(str(number), 0.5) for number in range(10, 100))
    assert f"found {found}" in str(error.value)
    assert "task.heldout_share" in str(error.value)


@pytest.mark.parametrize(
    ("text", "value", "correct"),
    [
        ("4+7+8+5 [ANSWER] 24", 1.1, True),
        ("[ANSWER] 24", 1.1, True),
        ("[ANSWER] 24\n", 1.1, True),
        ("[ANSWER] 024", 1.1, True),
        ("[ANSWER] 3 [ANSWER] 24", 1.1, True),
        ("[ANSWER] 24 [ANSWER] 3", 0.1, False),
        ("4+7+8+5 [ANSWER] 25", 0.1, False),
        ("[ANSWER] 240", 0.1, False),
        ("[ANSWER] " + "2" * 5000, 0.1, False),
        ("", 0, False),
        ("24", 0, False),
        ("[ANSWER]", 0, False),
        ("[ANSWER] ", 0, False),
        ("[ANSWER]24", 0, False),
        ("[answer] 24", 0, False),
        ("[ANSWER] 24 or so", 0, False),
        ("[ANSWER] 24.", 0, False),
        ("[ANSWER] 24x", 0, False),
        ("[ANSWER] x24", 0, False),
        ("[ANSWER] -24", 0, False),
        ("[ANSWER] 2 4", 0, False),
    ],
    ids=lambda value: str(value)[:24],
)
def test_reward(text, value, correct):
    (reward,) = rewards([text], 24)
    assert reward.value == pytest.approx(value)
    assert reward.correct is correct
    assert sum(reward.parts.values()) == pytest.approx(reward.value)
    assert reward.parts.keys() == {"exact", "format"}


def test_a_group_is_scored_in_order_with_the_configured_format_reward():
    scored = rewards(["[ANSWER] 5", "no", "[ANSWER] 6"], 5, format_reward=0.25)
    assert [reward.value for reward in scored] == [1.25, 0, 0.25]


def demonstrations(sums, count):
    for index in range(count):
        example = sums.train_example(-1 - index)
        text = sums.demonstration(example, random.Random(index))
        (reward,) = sums.reward(
            [Completion(0, 0, [1], text, [2], token_logprobs=[-1.0])], example.expected_answer
        )
        yield example, text, reward


def test_every_demonstration_has_the_form_and_ends_in_its_last_sum():
    for example, text, reward in demonstrations(task(), 500):
        sums, answer = re.fullmatch(r"([\d ]+) \[ANSWER\] (\d+)", text).groups()
        assert len(sums.split()) == len(question(example).replace(" ", ""))
        assert sums.split()[-1] == answer
        assert reward.parts["format"] == pytest.approx(0.1)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.75, 1.0])
def test_demonstrations_forget_tens_above_nineteen_as_often_as_configured(share):
    above = []
    for example, text, reward in demonstrations(task(forgotten_carries=share, max_numbers=2), 3000):
        if example.expected_answer < 20:
            assert reward.correct
        else:
            above.append(not reward.correct)
            missing = example.expected_answer - int(text.split()[-1])
            assert missing in ((0,) if reward.correct else (10, 20))
    # Four standard deviations of more than 1000 draws; 0 and 1 are exact.
    assert len(above) > 1000
    assert sum(above) / len(above) == pytest.approx(share, abs=0.063 if 0 < share < 1 else 0)


def test_a_demonstration_is_a_function_of_its_rng():
    example = task().train_example(0)
    first, again = (task().demonstration(example, random.Random(3)) for _ in range(2))
    assert first == again


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_numbers": 0}, r"task\.min_numbers must be at least 1.*got 0 and 4"),
        ({"min_numbers": 5}, r"at most task\.max_numbers; got 5 and 4"),
        ({"max_numbers": 0}, "got 2 and 0"),
        ({"digits": 0}, r"task\.digits must be at least 1; got 0"),
        ({"heldout_share": 0.0}, r"task\.heldout_share must be in \(0, 1\); got 0"),
        ({"heldout_share": 1.0}, r"task\.heldout_share must be in \(0, 1\); got 1"),
        ({"forgotten_carries": 1.5}, r"task\.forgotten_carries"),
        ({"forgotten_carries": -0.1}, r"task\.forgotten_carries"),
    ],
)
def test_a_bad_config_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SumDigits.Config(**settings)


def test_a_task_without_demonstrations_says_so():
    class Silent(Task):
        @dataclass(kw_only=True, slots=True)
        class Config(Task.Config):
            pass

        def train_example(self, index):
            return Example([], None)

        def heldout_examples(self, count):
            return []

        def reward(self, completions, expected_answer):
            return []

    with pytest.raises(NotImplementedError, match="task 'task' has no demonstrations"):
        Silent.Config().build().demonstration(Example([], None), random.Random(0))


def test_a_task_without_a_config_of_its_own_is_refused():
    with pytest.raises(TypeError, match="task Mine needs a Config of its own, or SumDigits is"):

        class Mine(SumDigits):
            def expected(self, question):
                return 0


def test_a_task_of_a_notebook_travels():
    class Mine(SumDigits):
        @dataclass(kw_only=True, slots=True)
        class Config(SumDigits.Config):
            name: str = "mine"

        def expected(self, question):
            return 42

    # By value, as a class of `__main__` does: in the other process it is built piece by piece.
    travelled = cloudpickle.loads(cloudpickle.dumps(Mine.Config())).build()
    assert (travelled.name, travelled.expected("1 2")) == ("mine", 42)


def test_a_pretrained_model_is_asked_in_words_and_may_answer_in_its_own():
    words = {"prompt": "What are the digits of {} in all?", "answer": r"= (\d+)\.?\s*$"}
    one = task(min_numbers=1, max_numbers=1, digits=3, **words)
    example = one.train_example(0)
    asked = re.fullmatch(r"What are the digits of (\d{3}) in all\?", question(example))
    assert asked
    assert example.expected_answer == sum(map(int, asked[1]))
    said = ["2 + 5 + 3 = 10.", "2 + 5 + 3 = 10\n", "It is 10.", "= 10, or = 11.", "= 11."]
    given = [(r.value, r.correct) for r in rewards(said, 10, **words)]
    assert given == [(1.1, True), (1.1, True), (0.0, False), (0.1, False), (0.1, False)]


@pytest.mark.parametrize(
    ("text", "value"),
    [("the sum is 24", 1.1), ("the sum", 0.0), ("sum is 3, sum is 24", 1.1), ("sum is 3", 0.1)],
)
def test_an_answer_whose_group_may_be_missing_is_none_without_it(text, value):
    (reward,) = rewards([text], 24, answer=r"sum(?: is (\d+))?(?=,|$)")
    assert reward.value == pytest.approx(value)


@pytest.mark.parametrize("answer", [r"= (\d+)\.?\s*$", r"^(\d+)"])
def test_a_demonstration_that_the_task_itself_cannot_read_is_refused(answer):
    other = task(answer=answer)
    with pytest.raises(ValueError, match=r"'\[ANSWER\] \d+', which task\.answer .*--model"):
        other.demonstration(other.train_example(0), random.Random(0))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"prompt": "Add up."}, "one {}"),
        ({"prompt": "{} and {}"}, "one {}"),
        ({"prompt": "Add up the 3 digits of {}."}, "no digits"),
        ({"answer": "("}, "no regular expression"),
        ({"answer": r"= \d+"}, "task.answer '= \\\\d+' has 0 groups; mark the answer with one"),
        ({"answer": r"(=|is) (\d+)"}, "has 2 groups"),
        ({"answer": ""}, "has 0 groups"),
    ],
)
def test_a_prompt_or_an_answer_that_cannot_be_is_refused(wrong, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        task(**wrong)
