"""KL estimators: values, clamps, gradients, and what their expectations are."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.algorithms.kl import ESTIMATORS
from torchtitan_rl.config import KLConfig

E = math.e


@pytest.mark.parametrize(
    ("name", "d", "value", "slope"),
    [
        ("k1", 1.5, 1.5, 1.0),
        ("k1", -1.5, -1.5, 1.0),
        ("abs", 1.5, 1.5, 1.0),
        ("abs", -1.5, 1.5, -1.0),
        ("k2", 3.0, 4.5, 3.0),
        ("k2", -3.0, 4.5, -3.0),
        ("k3", 1.0, 1 / E, 1 - 1 / E),
        ("k3", -1.0, E - 2, 1 - E),
        ("k3", 5.0, math.exp(-5) + 4, 1 - math.exp(-5)),
        # Above 10 it is 10, and no longer pulls.
        ("k3", 12.0, 10.0, 0.0),
        ("k3", -3.0, 10.0, 0.0),
        ("k3", 1000.0, 10.0, 0.0),
        ("k3", -1000.0, 10.0, 0.0),
        ("k1", 0.0, 0.0, 1.0),
        ("abs", 0.0, 0.0, 0.0),
        ("k2", 0.0, 0.0, 0.0),
        ("k3", 0.0, 0.0, 0.0),
    ],
)
def test_value_and_gradient(name, d, value, slope):
    difference = torch.tensor(d, dtype=torch.float64, requires_grad=True)
    result = ESTIMATORS[name](difference)
    result.backward()
    assert result.item() == pytest.approx(value)
    assert difference.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_gradient_agrees_with_finite_differences(name):
    # Away from the kinks of abs at 0 and of k3 where it reaches 10.
    d = torch.tensor([-8, -2.1, -0.3, 0.2, 1.7, 6, 15], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ESTIMATORS[name], d)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(d=st.floats(-1e4, 1e4, width=32))
def test_any_difference_gives_a_finite_value_and_gradient(name, d):
    difference = torch.tensor(d, requires_grad=True)
    result = ESTIMATORS[name](difference)
    result.backward()
    assert math.isfinite(result.item())
    assert math.isfinite(difference.grad.item())
    assert name == "k1" or result.item() >= 0
    assert name != "k3" or result.item() <= 10


# What they are on average over tokens sampled from p, of the KL from p to q.

LOGITS = [0.3, -1.0, 1.2, 0.0]
OTHER = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)


def expectations(name):
    """The exact mean of an estimate and of its gradient, the KL and its gradient."""
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    t = torch.log_softmax(logits, -1)
    estimates = ESTIMATORS[name](t - OTHER.log())
    p = t.exp()
    (slope,) = torch.autograd.grad((p.detach() * estimates).sum(), logits, retain_graph=True)
    kl = (p * (t - OTHER.log())).sum()
    (kl_slope,) = torch.autograd.grad(kl, logits, retain_graph=True)
    return (p * estimates).sum().item(), slope.tolist(), kl.item(), kl_slope.tolist()


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_estimate_the_kl_without_bias(name):
    mean, _, kl, _ = expectations(name)
    assert mean == pytest.approx(kl)


def test_as_a_loss_k2_has_the_gradient_of_the_kl_and_k1_none():
    _, slope, _, kl_slope = expectations("k2")
    assert slope == pytest.approx(kl_slope)
    _, slope, _, _ = expectations("k1")
    assert slope == pytest.approx([0.0] * 4, abs=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"estimator": "k4"}, "unknown KL estimator 'k4'.*Known: abs, k1, k2, k3"),
        ({"estimator": "absolute"}, "unknown KL estimator 'absolute'.*Known: abs, k1, k2, k3"),
        ({"coef": -0.1}, "must be 0 .* or a positive number; got -0.1"),
        ({"coef": math.inf}, "got inf"),
        ({"coef": math.nan}, "got nan"),
    ],
)
def test_a_bad_term_is_refused_in_the_config(settings, message):
    with pytest.raises(ValueError, match=message):
        KLConfig(**settings)


def test_a_term_is_off_unless_it_has_a_coefficient():
    assert not KLConfig().on
    assert KLConfig(coef=1e-3).on
    assert KLConfig().estimator == "k2"


@pytest.mark.parametrize(
    ("coef", "estimator", "noticed"),
    [(0.1, "k1", True), (0.0, "k1", False), (0.1, "k2", False), (0.1, "k3", False)],
)
def test_k1_as_a_loss_gets_a_notice(coef, estimator, noticed):
    notices = KLConfig(coef=coef, estimator=estimator).notices("loss.rollout_kl")
    assert len(notices) == noticed
    assert all("loss.rollout_kl.estimator is k1" in n for n in notices)
    assert all("zero expectation" in n for n in notices)
