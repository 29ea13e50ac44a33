"""A NaN that comes late has a name: the input, the term or the gradient where it was first."""

import math
import re

import pytest

from tests.algorithms.support import loss_inputs
from torchtitan_rl.algorithms.not_finite import NotFinite
from torchtitan_rl.algorithms.objective import LossError, objective
from torchtitan_rl.config import KLConfig, LossConfig

NAMES = ["sums/train/7/0/0", "sums/train/7/1/0"]
LATE = "tests.algorithms.late_losses"


def found(config, inputs):
    """What is noted in the forward and the backward pass of these tokens."""
    not_finite = NotFinite()
    output = objective(config, inputs)
    not_finite.watch(config, output.terms, inputs, NAMES)
    output.loss_sum.backward()
    return not_finite.found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"advantages": [1.0, math.inf, -1.0]}, "the advantages are not finite in 1 of 3 tokens"),
        ({"weights": [math.nan, 1.0, 1.0]}, r"the weights .* in 1 of 3 tokens, the first of them"),
        ({"o": [-1.0, -1.0, math.nan]}, r"old_logprobs\) are not finite in 1 of 3 tokens"),
        ({"g": [-1.0, math.nan, math.nan]}, r"\(generator_logprobs\) are not finite in 2 of 3"),
        ({"ref": [math.nan, -1.0, -1.0]}, r"\(ref_logprobs\) are not finite in 1 of 3"),
    ],
)
def test_an_input_is_named_with_its_first_sequence(changes, said):
    given = {"g": -1.0, "ref": -1.0, **changes}
    inputs = loss_inputs([-1.0, -0.5, -2.0], sequences=[0, 1, 1], **given)
    terms = {"ref_kl": KLConfig(coef=0.1), "rollout_kl": KLConfig(coef=0.1)}
    [cause] = found(LossConfig(**terms), inputs)
    first = next(i for values in changes.values() for i, v in enumerate(values) if v != v or v > 9)
    assert re.search(said, cause)
    assert f"in {NAMES[min(first, 1)]}" in cause


def test_a_loss_that_makes_nan_of_finite_inputs_is_named():
    inputs = loss_inputs([-1.0, -2.0], o=[-1.0, -5.0], advantages=[0.5, 1.0])
    [cause] = found(LossConfig(name=f"{LATE}:gives_nan"), inputs)
    assert cause == (
        f"loss '{LATE}:gives_nan' is nan although its inputs are finite; logprobs - old_logprobs "
        "are 0 to 3"
    )


def test_so_is_one_whose_gradient_alone_is_not_finite():
    [cause] = found(LossConfig(name=f"{LATE}:has_a_bad_gradient"), loss_inputs([-1.0]))
    assert f"the gradients of loss '{LATE}:has_a_bad_gradient', which is finite," in cause
    assert "in 1 of 1 tokens" in cause


def test_and_one_whose_gradient_is_finite():
    [cause] = found(LossConfig(name=f"{LATE}:is_a_constant"), loss_inputs([-1.0]))
    assert f"loss '{LATE}:is_a_constant' is nan although" in cause


def test_nothing_is_found_where_all_is_well():
    assert found(LossConfig(), loss_inputs([-1.0, -0.5], advantages=[1.0, -1.0])) == []


def test_a_loss_that_fails_in_training_names_its_line():
    with pytest.raises(
        LossError,
        match=rf"loss '{LATE}:raises' raised KeyError: 'two tokens' \(.*late_losses\.py:11\), "
        "on a microbatch of 2 tokens",
    ):
        objective(LossConfig(name=f"{LATE}:raises"), loss_inputs([-1.0, -2.0]))
    with pytest.raises(LossError, match=r"must return a LossOutput\(loss_sum, metrics\); got tens"):
        objective(LossConfig(name=f"{LATE}:returns_a_tensor"), loss_inputs([-1.0]))
