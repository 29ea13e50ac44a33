"""Intervals of shares, against published values and by simulation."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.core.intervals import change_interval, share_interval


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", Table I, method 3.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_a_share_has_wilsons_interval(right, count, low, high):
    assert share_interval(right / count, count) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("one", "other", "low", "high"),
    # Newcombe 1998, "Interval estimation for the difference", Table II, method 10: other - one.
    [
        ((48, 80), (56, 70), 0.0524, 0.3339),
        ((3, 10), (9, 10), 0.1705, 0.8090),
        ((0, 10), (10, 10), 0.6075, 1.0),
    ],
)
def test_a_change_has_newcombes_interval(one, other, low, high):
    found = change_interval(one[0] / one[1], other[0] / other[1], (one[1], other[1]))
    assert found == pytest.approx((low, high), abs=1e-4)


@given(st.integers(0, 400), st.integers(1, 400))
def test_an_interval_holds_its_share_and_stays_within_0_and_1(right, count):
    share = min(right, count) / count
    low, high = share_interval(share, count)
    assert 0 <= low <= share + 1e-12
    assert share - 1e-12 <= high <= 1


def test_without_trials_nothing_is_known():
    assert share_interval(0.0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.95])
def test_nineteen_of_twenty_intervals_hold_the_truth(share):
    rng = random.Random(0)
    held = 0
    for _ in range(2000):
        found = sum(rng.random() < share for _ in range(80)) / 80
        low, high = share_interval(found, 80)
        held += low <= share <= high
    assert held / 2000 == pytest.approx(0.95, abs=0.03)
