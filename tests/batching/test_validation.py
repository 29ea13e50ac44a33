"""What is refused on the driver, before any rank sees it."""

import math

import numpy as np
import pytest

from tests.support import episode
from torchtitan_rl.batching.validation import require, validate
from torchtitan_rl.core.experts import Experts

NAN = math.nan


def full_episode(**changes):
    """An episode with every optional field."""
    return episode(**{"ref_logprobs": [-0.25, -2.0], **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"token_logprobs": None},
        {"ref_logprobs": [-0.5, -1.0], "weight": 0.0},
        {"loss_mask": [False, True, True, False, True]},
        {"loss_mask": [False] * 5},
        {"token_ids": [], "token_logprobs": []},
        {"token_ids": [], "token_logprobs": [], "loss_mask": [False, True, True]},
        {"policy_version": 3},
        {"prompt_token_ids": [0, 1, 9]},
        {"advantage": -2.0, "temperature": 0.1},
        # What does not train may be anything: a reward model's text, a tool's answer.
        {"token_logprobs": [NAN, -1.0], "loss_mask": [False, False, False, False, True]},
        {"ref_logprobs": [-1.0, -math.inf], "loss_mask": [False, False, True, True, False]},
    ],
)
def test_a_good_episode_is_valid(changes):
    validate([episode(**changes)], vocab_size=10, version=3)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"prompt_token_ids": [], "token_ids": []}, "the prompt is empty"),
        ({"token_ids": [4, 10]}, r"token id 10 lies outside 0\.\.9"),
        ({"prompt_token_ids": [1, 10, 3]}, r"token id 10 lies outside 0\.\.9"),
        ({"token_ids": [4, -1]}, "token id -1 is negative"),
        ({"token_logprobs": [-0.5]}, "token_logprobs has 1 values for 2 tokens"),
        ({"token_logprobs": [-0.5] * 3}, "token_logprobs has 3 values for 2 tokens"),
        ({"token_ids": [], "token_logprobs": [-0.5]}, "has 1 values for 0 tokens"),
        ({"token_logprobs": [-0.5, NAN]}, "token_logprobs holds a value that is not finite"),
        ({"token_logprobs": [-math.inf, -1.0]}, "token_logprobs holds a value that is not"),
        ({"ref_logprobs": [-0.5]}, "ref_logprobs has 1 values for 2 tokens"),
        ({"ref_logprobs": [-0.5, NAN]}, "ref_logprobs holds a value that is not finite"),
        (
            {"ref_logprobs": [NAN, 0.0], "loss_mask": [False, False, False, True, False]},
            "ref_logprobs holds a value that is not finite",
        ),
        ({"loss_mask": [False, True]}, "loss_mask has 2 values for 5 tokens"),
        ({"loss_mask": []}, "loss_mask has 0 values for 5 tokens"),
        ({"echo_alpha": [0.5] * 5}, "echo_alpha trains token 0"),
        ({"echo_alpha": [math.nan, 0.5]}, "echo_alpha has 2 values for 5 tokens"),
        ({"echo_alpha": [math.nan] * 4 + [math.inf]}, "echo_alpha holds a value that is not fin"),
        ({"loss_mask": [True] * 5}, "loss_mask trains token 0"),
        ({"advantage": NAN}, "the advantage is nan"),
        ({"advantage": math.inf}, "the advantage is inf"),
        ({"weight": NAN}, "the weight is nan"),
        ({"weight": math.inf}, "the weight is inf"),
        ({"temperature": 0.0}, r"the temperature is 0\.0; greedy"),
        ({"temperature": -1.0}, r"the temperature is -1\.0"),
        ({"temperature": NAN}, "the temperature is nan"),
        ({"temperature": math.inf}, "the temperature is inf"),
        ({"policy_version": 4}, "policy version 4 is newer than the trainer's 3"),
    ],
)
def test_a_bad_episode_is_refused_by_task_and_group(changes, problem):
    bad = episode(task="chat", group_id="chat/train/3", **changes)
    with pytest.raises(ValueError, match=problem) as error:
        validate([episode(), bad], vocab_size=10, version=3)
    assert "task 'chat', group 'chat/train/3'" in str(error.value)


def test_a_negative_id_is_refused_without_a_vocabulary_and_without_an_impossible_range():
    with pytest.raises(ValueError, match="token id") as error:
        validate([episode(token_ids=[4, -5])])
    assert "0..-1" not in str(error.value)


def test_ids_and_versions_are_unbounded_without_bounds():
    validate([episode(token_ids=[4, 10**6], policy_version=10**6)])


@pytest.mark.parametrize(
    ("changes", "needs", "problem"),
    [
        ({"token_logprobs": None}, "token_logprobs", "it has no token_logprobs, which"),
        ({"ref_logprobs": None}, "ref_logprobs", "it has no ref_logprobs, which"),
    ],
)
def test_a_field_that_a_setting_needs_is_asked_of_every_episode(changes, needs, problem):
    wanted = {needs: "trainer.loss.some_term"}
    require([full_episode()], wanted)
    validate([full_episode(**changes)])
    bad = full_episode(task="chat", group_id="chat/train/3", **changes)
    with pytest.raises(ValueError, match=rf"{problem} trainer\.loss\.some_term needs") as error:
        require([full_episode(), bad], wanted)
    assert "task 'chat', group 'chat/train/3'" in str(error.value)


@pytest.mark.parametrize("field", ["token_logprobs", "ref_logprobs"])
def test_a_prompt_token_cannot_train_where_logprobs_of_sampled_tokens_are_needed(field):
    trains_prompt = full_episode(loss_mask=[False, True, False, True, True])
    validate([trains_prompt])
    with pytest.raises(ValueError, match=f"no {field}; trainer.loss.some_term needs it"):
        require([trains_prompt], {field: "trainer.loss.some_term"})


def test_a_prompt_token_may_train_where_what_is_needed_covers_the_prompt():
    trains_prompt = full_episode(loss_mask=[False, True, False, True, True])
    require([trains_prompt], {"advantages": "trainer.loss.some_term"})


def test_no_episodes_are_nothing_to_refuse():
    validate([], vocab_size=10, version=3)
    require([], {"ref_logprobs": "trainer.loss.some_term"})


def test_what_was_added_after_validation_is_looked_at_too():
    bad = full_episode(ref_logprobs=[-0.5, math.nan])
    with pytest.raises(ValueError, match="ref_logprobs holds a value that is not finite"):
        require([bad], {"ref_logprobs": "trainer.loss.ref_kl"})


EXPERTS = Experts(layers=2, top_k=2, count=8)


def routed(routing):
    return [episode(task="chat", group_id="chat/3", routed_experts=routing)]


def routing(first=(0, 1), *, layers=2, dtype=np.uint8):
    return np.tile(np.array(first, dtype=dtype), (5, layers, 1))


def test_routing_that_fits_is_valid():
    validate(routed(routing((7, 0))), experts=EXPERTS)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (routing(layers=3), r"shape \(5, 3, 2\); the model needs \[tokens, 2 layers.* top 2\]"),
        (routing((0, 1, 2)), r"shape \(5, 2, 3\)"),
        (routing()[:, 0], r"shape \(5, 2\)"),
        (routing()[:4], "routed_experts has 4 values for 5 tokens"),
        (routing(dtype=np.int16), "routed_experts is int16; expected uint8"),
        (routing((0, 8)), r"outside 0\.\.7"),
        (routing((3, 3)), "names an expert twice"),
    ],
)
def test_routing_that_does_not_fit_the_model_is_refused(wrong, problem):
    with pytest.raises(ValueError, match=rf"task 'chat', group 'chat/3': .*{problem}"):
        validate(routed(wrong), experts=EXPERTS)


def test_a_dense_model_has_no_use_for_routing():
    with pytest.raises(ValueError, match="the model has no experts"):
        validate(routed(routing()))
