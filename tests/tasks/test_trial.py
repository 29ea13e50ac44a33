"""A task that cannot work is refused before any process of the run starts, with file and line."""

import random

import pytest

from tests.low_tokens import LowTokens
from tests.tasks.misbehaving import BadTool, Misbehaving
from torchtitan_rl.tasks.checked import TaskError, demonstration, train_example
from torchtitan_rl.tasks.mixture import Mixture
from torchtitan_rl.tasks.sum_digits import SumDigits
from torchtitan_rl.tasks.trial import build_task, is_built_in, try_rewards

PLACE = r"\(/.*misbehaving\.py:\d+\)"


def tried(config, seconds=60.0):
    return try_rewards(build_task(config, seed=0), seconds=seconds)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no task", f"building task 'misbehaving' raised KeyError: 'data' {PLACE}"),
        (
            "example raises",
            rf"train_example\(0\) of task 'misbehaving' raised KeyError: 'lost' {PLACE}",
        ),
        (
            "dict",
            r"train_example\(0\) of task 'misbehaving' returned a dict: {'messages'.*; expected an "
            rf"Example\(messages, expected_answer\) {PLACE}",
        ),
        ("text", f"an Example whose messages are a str: 'What.*expected a list such as.* {PLACE}"),
        ("no role", f"an Example whose message 0 has no 'role'; .* {PLACE}"),
        ("state", f"an Example whose state is None; expected a dict {PLACE}"),
        (
            "nothing held out",
            rf"heldout_examples\(1\) .* returned no example, and must return .* {PLACE}",
        ),
        ("held-out text", rf"heldout_examples\(1\)\[0\] .* returned a str: 'What .* {PLACE}"),
        ("none", f"on trial with '7' and .* returned None; expected a list of rewards.* {PLACE}"),
        ("count", f"returned 1 rewards for 2 completions {PLACE}"),
        ("type", f"returned 'right' for completion 0; expected a finite number {PLACE}"),
        ("nan", f"returned Reward.*nan.* for completion 0; expected a finite number {PLACE}"),
        (
            "raises",
            "reward function of task 'misbehaving', on trial with '7' and 'This is a trial.', "
            f"raised AttributeError: 'Rollout' object has no attribute 'answer' {PLACE}",
        ),
        ("exits", f"raised SystemExit: 3 {PLACE}"),
        ("dies", "reward function of task 'misbehaving', on trial, ended its process: no license"),
    ],
)
def test_a_mistake_in_a_task_is_found_before_the_run(how, said):
    with pytest.raises(TaskError, match=said):
        tried(Misbehaving.Config(how=how))


def test_a_reward_function_that_hangs_is_killed():
    with pytest.raises(TaskError, match=r"on trial, gave no answer in 0\.2 s"):
        tried(Misbehaving.Config(how="hangs"), seconds=0.1)


def test_one_that_raises_on_some_texts_is_worth_a_word():
    [said] = tried(Misbehaving.Config(how="raises on some"))
    assert "raised ValueError: invalid literal" in said
    assert "misbehaving.py:" in said
    assert "is dropped" in said


def test_a_good_task_passes_without_a_word():
    assert tried(Misbehaving.Config()) == []
    assert tried(LowTokens.Config()) == []


def test_a_built_in_task_needs_no_trial():
    assert is_built_in(SumDigits.Config().build())
    assert not is_built_in(LowTokens.Config().build())


def test_a_member_of_a_mixture_is_named():
    for how, said in (
        ("no task", "building task 'misbehaving' raised KeyError"),
        ("dict", r"train_example\(0\) of task 'misbehaving' returned a dict"),
        ("count", "reward function of task 'misbehaving'.* returned 1 rewards"),
    ):
        with pytest.raises(TaskError, match=f"^{said}.*misbehaving.py"):
            tried(Mixture.Config(tasks=[SumDigits.Config(), Misbehaving.Config(how=how)]))


def test_an_example_late_in_a_run_has_its_place_too():
    task = Mixture.Config(tasks=[Misbehaving.Config(how="dict")]).build(seed=0)
    with pytest.raises(TaskError, match=rf"train_example\(384\) .* returned a dict.* {PLACE}"):
        train_example(task, 384)


def test_a_tool_that_cannot_be_built_is_named_with_its_place():
    with pytest.raises(
        ValueError, match=f"tool 'apply' of BadTool cannot be described: .* {PLACE}"
    ):
        tried(BadTool.Config(show_tools=False))


def test_a_demonstration_that_fails_has_its_place():
    task = Misbehaving.Config().build(seed=0)
    with pytest.raises(
        TaskError, match=f"demonstration of task 'mis.*' raised KeyError: 7 {PLACE}"
    ):
        demonstration(task, task.train_example(0), random.Random(0))
