"""Echo's factor: that which gives it its share, found in a few updates and never far off."""

import math
import random
from statistics import fmean

import pytest

from torchtitan_rl.algorithms.echo_share import MOST_CHANGE, first_factor, next_factor


def share_of(factor, ratio):
    """Echo's share, if without a factor its gradient is `ratio` times that of all other terms."""
    return factor * ratio / (1 + factor * ratio)


@pytest.mark.parametrize("most", [0.05, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("ratio", [0.01, 0.3, 2.0, 30.0, 3000.0])
def test_the_first_factor_gives_the_share_or_leaves_less_as_it_is(ratio, most):
    factor = first_factor(share_of(1.0, ratio), most=most)
    assert share_of(factor, ratio) == pytest.approx(min(most, share_of(1.0, ratio)), rel=1e-6)
    assert factor <= 1


@pytest.mark.parametrize("start", [1.0, 0.01])
@pytest.mark.parametrize("ratio", [0.1, 2.0, 30.0, 3000.0])
def test_the_factor_follows_gradients_that_have_changed(ratio, start):
    factor = start
    for _ in range(20):
        factor = next_factor(factor, share_of(factor, ratio), most=0.2)
    assert share_of(factor, ratio) == pytest.approx(min(0.2, share_of(1.0, ratio)), rel=0.01)


def test_the_share_is_right_on_average_where_gradients_are_noisy():
    rng, factor, shares = random.Random(0), 1.0, []
    for _ in range(1000):
        shares.append(share_of(factor, 20.0 * math.exp(rng.gauss(0, 0.5))))
        factor = next_factor(factor, shares[-1], most=0.2)
    assert fmean(shares[20:]) == pytest.approx(0.2, abs=0.02)
    assert max(shares[20:]) < 0.6


@pytest.mark.parametrize(
    ("factor", "share", "expected"),
    [
        (0.1, 0.2, 0.1),  # as it should be
        (0.1, 0.5, 0.05),  # a quarter would have been right: halfway, in logarithms
        (0.1, 1.0, 0.1 / MOST_CHANGE),  # a batch without a signal for RL
        (0.01, 0.0, 0.01 * MOST_CHANGE),  # a batch without a gradient of Echo
        (0.25, 0.0, 0.5),
        (1.0, 0.1, 1.0),  # never more than alpha says
        (1e-6, 1.0, 1e-6),  # never 0, from which nothing comes back
    ],
)
def test_one_update_changes_the_factor_by_so_much(factor, share, expected):
    assert next_factor(factor, share, most=0.2) == pytest.approx(expected)
