"""Advantages: the formulas, what holds for any group, and what the framework refuses."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.algorithms.advantage import (
    ADVANTAGES,
    check_advantage,
    group_advantages,
    length_penalty,
)
from torchtitan_rl.config import AdvantageConfig
from torchtitan_rl.core.types import Completion, ScoredCompletion

WITH_BASELINE = ["mean_baseline", "grpo", "rloo", "maxrl"]


def group_of(rewards, lengths=None):
    def completion(length):
        return Completion(
            policy_version=0,
            prompt_idx=0,
            prompt_token_ids=[1],
            text="",
            token_ids=[2] * length,
            token_logprobs=[-1.0] * length,
            finish_reason="stop",
        )

    return [
        ScoredCompletion(completion(length), reward, correct=reward >= 1)
        for reward, length in zip(rewards, lengths or [1] * len(rewards), strict=True)
    ]


def advantages(name, rewards, **kwargs):
    return group_advantages(AdvantageConfig(name=name, kwargs=kwargs), group_of(rewards), "g")


HALF_STD = math.sqrt(0.5)
STD_7 = math.sqrt(7)


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("mean_baseline", [1, 0], [0.5, -0.5]),
        ("mean_baseline", [1, 2, 6], [-2, -1, 3]),
        ("mean_baseline", [-1, -3], [1, -1]),
        ("mean_baseline", [7], [0]),
        ("grpo", [1, 0], [0.5 / (HALF_STD + 1e-6), -0.5 / (HALF_STD + 1e-6)]),
        ("grpo", [1, 2, 6], [-2 / (STD_7 + 1e-6), -1 / (STD_7 + 1e-6), 3 / (STD_7 + 1e-6)]),
        ("grpo", [7], [0]),
        ("rloo", [1, 0], [1, -1]),
        ("rloo", [1, 2, 6], [-3, -1.5, 4.5]),
        ("rloo", [7], [0]),
        ("maxrl", [1, 0], [1, -1]),
        ("maxrl", [1, 0, 0, 0], [3, -1, -1, -1]),
        ("maxrl", [1, 2, 6], [-2 / 3, -1 / 3, 1]),
        ("maxrl", [0, 0], [0, 0]),
        ("maxrl", [1, -1], [0, 0]),
        ("maxrl", [-1, -3], [0, 0]),
        ("maxrl", [7], [0]),
        ("reward", [1, 0], [1, 0]),
        ("reward", [-2.5], [-2.5]),
    ],
)
def test_formula(name, rewards, expected):
    assert advantages(name, rewards) == pytest.approx(expected, abs=1e-12)


def test_the_default_is_the_mean_baseline():
    assert group_advantages(AdvantageConfig(), group_of([1, 2, 6]), "g") == [-2, -1, 3]


# Quarters add up exactly, so what is compared is the formula, not the rounding of its input.
quarters = st.integers(-400, 400).map(lambda i: i / 4)
rewards_of_any_size = st.lists(quarters, min_size=1, max_size=17)


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(deadline=None, max_examples=50)
@given(rewards=rewards_of_any_size)
def test_any_group_size_gives_one_finite_float_each(name, rewards):
    result = advantages(name, rewards)
    assert len(result) == len(rewards)
    assert all(type(value) is float and math.isfinite(value) for value in result)


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(deadline=None, max_examples=50)
@given(data=st.data(), rewards=rewards_of_any_size)
def test_permuting_a_group_permutes_its_advantages(name, data, rewards):
    order = data.draw(st.permutations(range(len(rewards))))
    before = advantages(name, rewards)
    after = advantages(name, [rewards[i] for i in order])
    assert after == pytest.approx([before[i] for i in order], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", ["mean_baseline", "grpo", "rloo"])
@settings(deadline=None, max_examples=50)
@given(rewards=rewards_of_any_size, shift=quarters)
def test_a_constant_added_to_all_rewards_changes_nothing(name, rewards, shift):
    shifted = advantages(name, [reward + shift for reward in rewards])
    assert shifted == pytest.approx(advantages(name, rewards), rel=1e-9, abs=1e-6)


@settings(deadline=None, max_examples=50)
@given(rewards=rewards_of_any_size, factor=st.sampled_from([0.25, 2, 64]))
def test_maxrl_does_not_depend_on_the_unit_of_the_reward(rewards, factor):
    scaled = advantages("maxrl", [reward * factor for reward in rewards])
    assert scaled == pytest.approx(advantages("maxrl", rewards), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", ["mean_baseline", "rloo"])
@settings(deadline=None, max_examples=50)
@given(rewards=rewards_of_any_size)
def test_a_groups_advantages_sum_to_zero(name, rewards):
    assert sum(advantages(name, rewards)) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", WITH_BASELINE)
@settings(deadline=None, max_examples=50)
@given(reward=st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.1, -0.3]), size=st.integers(1, 16))
def test_equal_rewards_give_exactly_zero(name, reward, size):
    # Exactly, not nearly: such a group is left out because none of its advantages is true.
    assert advantages(name, [reward] * size) == [0.0] * size


# Plug-ins, found by this module's own import path.


def scaled(group, *, factor, offset=0.0):
    return [factor * scored.reward + offset for scored in group]


def one_too_few(group):
    return [0.0] * (len(group) - 1)


def last_is(group, *, value):
    return [0.0] * (len(group) - 1) + [value]


def misspelt(group):
    return [scored.rewards for scored in group]


def forgot_to_return(group):
    return None


def test_a_function_of_ones_own_by_import_path_with_kwargs():
    name = f"{__name__}:scaled"
    assert advantages(name, [1, 2], factor=10) == [10.0, 20.0]
    assert advantages(name, [1, 2], factor=10, offset=1) == [11.0, 21.0]


@pytest.mark.parametrize(
    ("function", "kwargs", "problem"),
    [
        ("one_too_few", {}, "returned 1 values .* has 2 completions"),
        ("last_is", {"value": math.nan}, "returned nan for completion 1"),
        ("last_is", {"value": math.inf}, "returned inf for completion 1"),
        ("last_is", {"value": -math.inf}, "returned -inf for completion 1"),
        ("last_is", {"value": "0.5"}, "returned '0.5' for completion 1"),
        ("last_is", {"value": None}, "returned None for completion 1"),
        ("forgot_to_return", {}, "returned None"),
        ("misspelt", {}, "failed for group .*: AttributeError"),
    ],
)
def test_a_bad_result_names_the_function_the_group_and_the_value(function, kwargs, problem):
    name = f"{__name__}:{function}"
    with pytest.raises(ValueError, match=problem) as error:  # on trial, before any run
        check_advantage(AdvantageConfig(name=name, kwargs=kwargs))
    assert name in str(error.value)
    config = AdvantageConfig(name=name, kwargs=kwargs)
    with pytest.raises(ValueError, match=problem) as error:
        group_advantages(config, group_of([1, 0]), "sums/train/7")
    assert name in str(error.value)
    assert "group sums/train/7" in str(error.value)
    assert f"({__file__}:" in str(error.value)


def test_an_empty_group_is_refused_by_name():
    with pytest.raises(ValueError, match="group sums/train/7 is empty"):
        group_advantages(AdvantageConfig(), [], "sums/train/7")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("grop", "did you mean 'grpo'"),
        ("mean_base", "did you mean 'mean_baseline'"),
        ("xyz", "Known: grpo, maxrl, mean_baseline, reward, rloo"),
        (f"{__name__}:scale", "did you mean 'scaled'"),
        ("no.such.module:f", "cannot import 'no.such.module'"),
    ],
)
def test_an_unknown_name_is_refused_in_the_config(name, hint):
    with pytest.raises(ValueError, match=hint):
        check_advantage(AdvantageConfig(name=name))


@pytest.mark.parametrize(
    ("name", "kwargs", "argument"),
    [
        ("grpo", {"epsilon": 1e-6}, "epsilon"),
        (f"{__name__}:scaled", {"facto": 2}, "facto"),
        (f"{__name__}:scaled", {}, "factor"),
    ],
)
def test_arguments_the_function_does_not_take_are_refused_in_the_config(name, kwargs, argument):
    with pytest.raises(ValueError, match=argument):
        check_advantage(AdvantageConfig(name=name, kwargs=kwargs))


@pytest.mark.parametrize(
    ("rewards", "lengths", "expected"),
    [
        ([1, 1], [10, 30], [1.5, 1]),  # mean of the best 20: bonus 1/2, and -1/2 clamped to 0
        ([1, 1, 0], [10, 30, 5], [1.5, 1, 0]),  # the wrong one has no part in it
        ([1, 0.9], [10, 1], [1, 0.9]),  # one best: it is the mean
        ([2, 2, 2], [3, 3, 3], [2, 2, 2]),
        ([1, 1], [0, 4], [2, 1]),
        ([1, 1], [0, 0], [1, 1]),
        ([0, 0], [1, 9], [0, 0]),  # nothing was right
        ([-1, -2], [1, 9], [-1, -2]),
    ],
)
def test_the_length_penalty_favours_the_shorter_of_the_best(rewards, lengths, expected):
    group = group_of(rewards, lengths)
    assert [s.reward for s in length_penalty(group)] == pytest.approx(expected)
    assert [s.reward for s in group] == rewards
    config = AdvantageConfig(name="reward", length_penalty=True)
    assert group_advantages(config, group, "g") == pytest.approx(expected)


def test_the_length_penalty_comes_before_the_baseline():
    config = AdvantageConfig(name="mean_baseline", length_penalty=True)
    assert group_advantages(config, group_of([1, 1], [10, 30]), "g") == [0.25, -0.25]
