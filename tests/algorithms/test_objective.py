"""The whole loss of a microbatch: its terms add up, and each sees the tokens it should."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.support import gradient, loss_inputs
from tests.reads import counting
from torchtitan_rl.algorithms.kl import ESTIMATORS
from torchtitan_rl.algorithms.objective import batch_terms, mismatch, objective
from torchtitan_rl.algorithms.policy_loss import LOSSES
from torchtitan_rl.config import CorrectionConfig, KLConfig, LossConfig
from torchtitan_rl.core.metrics import flatten, merge_metrics

T = [-0.5, -1.0, -2.0, -0.2]
OLD = [-0.6, -1.0, -1.8, -0.3]
GENERATOR = [-0.7, -1.3, -1.5, -3.2]
REFERENCE = [-0.4, -2.0, -2.5, -0.2]
ADVANTAGES = [1.0, -1.0, 0.5, 2.0]
WEIGHTS = [1.0, 0.5, 2.0, 0.25]


def tokens(**changes):
    streams = {"o": OLD, "g": GENERATOR, "ref": REFERENCE, "sequences": [0, 0, 1, 1]}
    return loss_inputs(T, **{**streams, "advantages": ADVANTAGES, "weights": WEIGHTS, **changes})


def no_tokens():
    return tokens_of([])


def tokens_of(rows, **changes):
    """Loss inputs from rows of (t, o, g, ref, A, weight)."""
    t, o, g, ref, advantages, weights = map(list, zip(*rows, strict=True)) if rows else [[]] * 6
    return loss_inputs(t, o=o, g=g, ref=ref, advantages=advantages, weights=weights, **changes)


def kl_sum(estimator, other, weights=WEIGHTS):
    differences = torch.tensor(T, dtype=torch.float64) - torch.tensor(other, dtype=torch.float64)
    return (ESTIMATORS[estimator](differences) * torch.tensor(weights)).sum().item()


@pytest.mark.parametrize("name", LOSSES)
def test_without_further_terms_it_is_the_policy_loss(name):
    output, plain = objective(LossConfig(name=name), tokens()), LOSSES[name](tokens())
    assert output.loss_sum.item() == plain.loss_sum.item()
    assert list(output.terms) == list(LossConfig(name=name).terms) == ["policy"]
    assert plain.metrics.items() <= output.metrics.items()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("rollout", [(0.0, "k3"), (0.3, "k2"), (0.1, "abs")])
@pytest.mark.parametrize("reference", [(0.0, "k3"), (0.2, "k3"), (1.5, "k1")])
def test_the_terms_add_up_with_their_coefficients(name, rollout, reference):
    config = LossConfig(
        name=name,
        rollout_kl=KLConfig(coef=rollout[0], estimator=rollout[1]),
        ref_kl=KLConfig(coef=reference[0], estimator=reference[1]),
    )
    expected = {
        "policy": LOSSES[name](tokens()).loss_sum.item(),
        "rollout_kl": rollout[0] * kl_sum(rollout[1], GENERATOR),
        "ref_kl": reference[0] * kl_sum(reference[1], REFERENCE),
    }
    output = objective(config, tokens())
    assert output.loss_sum.item() == pytest.approx(sum(expected.values()))
    on = {term: expected[term] for term in config.terms}
    assert {term: value.item() for term, value in output.terms.items()} == pytest.approx(on)
    assert {"policy", *(term for term, value in expected.items() if value)} == {*on}


def test_the_gradients_of_the_terms_add_up():
    inputs, plain = tokens(), tokens()
    config = LossConfig(
        rollout_kl=KLConfig(coef=0.3, estimator="k2"), ref_kl=KLConfig(coef=0.2, estimator="k1")
    )
    policy = gradient(LOSSES["grpo"](plain), plain)
    expected = [
        slope + weight * (0.3 * (t - g) + 0.2)
        for slope, weight, t, g in zip(policy, WEIGHTS, T, GENERATOR, strict=True)
    ]
    assert gradient(objective(config, inputs), inputs) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("config", "name", "g"),
    [
        # A correction that drops all tokens, and a trust region that does.
        (CorrectionConfig(token_mask="on", token_mask_bounds=(50, 60)), "grpo", GENERATOR),
        (CorrectionConfig(), "dppo", [-9.0] * 4),
    ],
)
def test_the_kl_takes_tokens_that_are_masked_elsewhere(config, name, g):
    t = [-0.5, -1.0, -1.2, -0.2]
    inputs = loss_inputs(t, o=t, g=g, weights=WEIGHTS)
    loss = LossConfig(name=name, correction=config, rollout_kl=KLConfig(coef=0.3))
    output = objective(loss, inputs)
    assert output.terms["policy"].item() == 0
    slopes = [0.3 * w * (x - y) for w, x, y in zip(WEIGHTS, t, g, strict=True)]
    assert gradient(output, inputs) == pytest.approx(slopes)


@pytest.mark.parametrize("name", LOSSES)
def test_a_mask_takes_its_tokens_share_of_the_sum_and_nothing_else(name):
    # w of the last token is exp(2.9); that of the others lies within the bounds.
    masked = LossConfig(name=name, correction=CorrectionConfig(token_mask="on"))
    inputs, kept = tokens(), tokens(weights=[1.0, 0.5, 2.0, 0.0])
    output, expected = objective(masked, inputs), LOSSES[name](kept)
    assert output.loss_sum.item() == pytest.approx(expected.loss_sum.item())
    slopes = gradient(output, inputs)
    assert slopes == pytest.approx(gradient(expected, kept))
    assert slopes[3] == 0 != slopes[0]


def test_an_importance_weight_multiplies_the_policy_loss_and_no_kl():
    correction = CorrectionConfig(importance_weight="token", importance_cap=100.0)
    config = LossConfig(
        name="reinforce",
        correction=correction,
        rollout_kl=KLConfig(coef=0.3),
        ref_kl=KLConfig(coef=0.2, estimator="k3"),
    )
    policy = -sum(
        weight * math.exp(o - g) * advantage * t
        for weight, o, g, advantage, t in zip(WEIGHTS, OLD, GENERATOR, ADVANTAGES, T, strict=True)
    )
    expected = policy + 0.3 * kl_sum("k2", GENERATOR) + 0.2 * kl_sum("k3", REFERENCE)
    assert objective(config, tokens()).loss_sum.item() == pytest.approx(expected, rel=1e-6)


def test_the_importance_weight_is_constant():
    # o is t itself here, as with one update per step: its gradient must not come in by w.
    inputs = tokens(o=None)
    config = LossConfig(name="reinforce", correction=CorrectionConfig(importance_weight="token"))
    slopes = [
        -weight * advantage * min(math.exp(t - g), 2)
        for weight, advantage, t, g in zip(WEIGHTS, ADVANTAGES, T, GENERATOR, strict=True)
    ]
    inputs.old_logprobs = inputs.logprobs
    assert gradient(objective(config, inputs), inputs) == pytest.approx(slopes, rel=1e-6)


EVERYTHING = {
    "rollout_kl": KLConfig(coef=0.1, estimator="k3"),
    "ref_kl": KLConfig(coef=0.1, estimator="k2"),
    "correction": CorrectionConfig(
        sequence_outliers="on",
        token_mask="on",
        importance_weight="token",
        sequence_mask="geometric",
    ),
}


def extreme_tokens():
    """Logprobs as far apart as they come, each way, each token a sequence of its own."""
    ends = [(-0.01, -100.0)] * 4
    rows = list(itertools.product(*ends, (-2.0, 0.0, 1.0), (1.0,)))
    return tokens_of(rows, sequences=list(range(len(rows))), dtype=torch.float32)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("terms", [{}, EVERYTHING], ids=["alone", "everything"])
def test_finite_logprobs_give_a_finite_loss_and_gradient(name, terms):
    inputs = extreme_tokens()
    output = objective(LossConfig(name=name, **terms), inputs)
    assert output.loss_sum.isfinite()
    assert all(map(math.isfinite, gradient(output, inputs)))


def test_finite_logprobs_give_finite_metrics():
    output = objective(LossConfig(name="reinforce", **EVERYTHING), extreme_tokens())
    metrics = flatten(output.metrics)
    assert [name for name, value in metrics.items() if not math.isfinite(value)] == []


logprobs = st.floats(-10, 0, width=32)
advantages = st.floats(-3, 3, width=32)
rows = st.tuples(logprobs, logprobs, logprobs, logprobs, advantages, st.floats(0, 2, width=32))


@pytest.mark.parametrize("name", LOSSES)
@settings(deadline=None, max_examples=50)
@given(rows=st.lists(rows, max_size=4))
def test_usual_logprobs_give_a_finite_loss_gradient_and_metrics(name, rows):
    inputs = tokens_of(rows, dtype=torch.float32)
    output = objective(LossConfig(name=name, **EVERYTHING), inputs)
    assert output.loss_sum.isfinite()
    assert all(map(math.isfinite, gradient(output, inputs)))
    assert all(map(math.isfinite, flatten(output.metrics).values()))


@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens_give_zero_with_a_gradient_and_no_metric_of_any_term(name):
    inputs = no_tokens()
    output = objective(LossConfig(name=name, **EVERYTHING), inputs)
    assert output.loss_sum.item() == 0
    assert gradient(output, inputs) == []
    assert flatten(output.metrics) == {}


@pytest.mark.parametrize(
    ("config", "missing", "message"),
    [
        ({"rollout_kl": KLConfig(coef=0.1)}, {"g": None}, "rollout_kl needs logprobs"),
        ({"ref_kl": KLConfig(coef=0.1)}, {"ref": None}, "ref_kl needs logprobs"),
        (
            {"correction": CorrectionConfig(importance_weight="token")},
            {"g": None},
            "loss.correction needs logprobs",
        ),
        ({"name": "dppo"}, {"g": None}, "dppo needs logprobs"),
    ],
)
def test_a_term_without_the_logprobs_it_needs_is_an_error(config, missing, message):
    with pytest.raises(ValueError, match=message):
        objective(LossConfig(**config), tokens(**missing))


def test_terms_that_are_off_need_no_logprobs():
    output = objective(LossConfig(), tokens(g=None, ref=None))
    assert flatten(output.metrics).keys() == {"loss/masked_high_share", "loss/masked_low_share"}


def test_each_term_has_its_metric():
    config = LossConfig(
        name="reinforce",
        rollout_kl=KLConfig(coef=0.3, estimator="abs"),
        ref_kl=KLConfig(coef=0.2, estimator="k1"),
        correction=CorrectionConfig(token_mask="on"),
    )
    output = objective(config, tokens())
    metrics = flatten(output.metrics)
    # o - g is 0.1, 0.3, -0.3, 2.9: the token mask drops the last; t - g is 0.2, 0.3, -0.5, 3.
    policy = -(1.0 * -0.5 + 0.5 * -1.0 * -1.0 + 2.0 * 0.5 * -2.0)
    ones = [1.0] * 4
    assert output.terms["policy"].item() == pytest.approx(policy)
    expected = {
        "rollout_kl": kl_sum("abs", GENERATOR, ones) / 4,
        "ref_kl": kl_sum("k1", REFERENCE, ones) / 4,
        "correction/token_mask_share": 0.25,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    apart = mismatch(tokens())
    assert apart["mismatch"].tolist() == pytest.approx([0.1, 0.3, 0.3, 2.9])
    assert apart["mismatch_kl"].max().item() == pytest.approx(math.exp(3) - 3 - 1)


def test_what_is_held_is_told_token_by_token():
    """Held by the trust region, on t - o: 0.1, 0, -0.2, 0.1; or by the correction, on o - g."""
    clip = {"clip_low": 0.1, "clip_high": 0.05}
    plain = objective(LossConfig(name="cispo", kwargs=clip), tokens())
    assert plain.high.tolist() == [True, False, False, True]
    assert plain.low.tolist() == [False, False, True, False]
    masks = CorrectionConfig(token_mask="on", token_mask_bounds=(0.8, 1.2))
    both = objective(LossConfig(name="cispo", kwargs=clip, correction=masks), tokens())
    assert both.high.tolist() == [True, True, False, True]
    assert both.low.tolist() == [False, False, True, False]
    alone = objective(LossConfig(name="reinforce", correction=masks), tokens())
    assert alone.high.tolist() == [False, True, False, True]
    assert objective(LossConfig(name="sapo"), tokens()).high is None


def test_metrics_of_microbatches_merge_to_those_of_the_batch():
    rows = list(zip(T, OLD, GENERATOR, REFERENCE, ADVANTAGES, WEIGHTS, strict=True))
    config = LossConfig(name="dual_clip", **EVERYTHING)
    whole = objective(config, tokens_of(rows, sequences=[0, 1, 2, 3]))
    parts = [objective(config, tokens_of([row])) for row in rows] + [objective(config, no_tokens())]
    merged = flatten(merge_metrics(part.metrics for part in parts))
    assert merged == pytest.approx(flatten(whole.metrics))
    total = sum(part.loss_sum.item() for part in parts)
    assert total == pytest.approx(whole.loss_sum.item())


def test_the_terms_of_a_batch_are_divided_by_its_own_counts():
    """Microbatches of a batch with 10 RL and 4 Echo tokens, by hand."""
    rl, echo = {"policy": torch.tensor(3.0), "ref_kl": torch.tensor(-1.0)}, torch.tensor(2.0)
    both = batch_terms(rl, echo, loss_tokens=10, echo_tokens=4)
    assert {n: t.item() for n, t in both.items()} == pytest.approx(
        {"policy": 0.3, "ref_kl": -0.1, "echo": 0.5}
    )
    assert batch_terms(rl, echo, loss_tokens=10, echo_tokens=0).keys() == {"policy", "ref_kl"}
    assert batch_terms(rl, echo, loss_tokens=0, echo_tokens=4).keys() == {"echo"}
    assert batch_terms(rl, echo, loss_tokens=0, echo_tokens=0) == {}


def test_mismatch_is_zero_where_trainer_and_generator_agree_and_else_positive():
    t, kl = [-1.0, -2.0, -3.0], [0.0, math.exp(-0.5) + 0.5 - 1, math.exp(0.5) - 0.5 - 1]
    apart = mismatch(loss_inputs(t, g=[-1.0, -1.5, -3.5]))
    assert apart["mismatch_kl"].tolist() == pytest.approx(kl)
    assert apart["mismatch"].tolist() == pytest.approx([0.0, 0.5, 0.5])
    assert not torch.cat(list(mismatch(loss_inputs(t, g=t)).values())).any()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("weight", ["off", "token", "sequence"])
@pytest.mark.parametrize("mask", ["off", "geometric", "product"])
def test_no_term_waits_for_a_gpu(name, weight, mask):
    """Neither in the forward pass nor in the backward pass, if it is told how many sequences."""
    correction = CorrectionConfig(
        importance_weight=weight, sequence_mask=mask, token_mask="on", sequence_outliers="on"
    )
    kl = KLConfig(coef=0.1)
    config = LossConfig(name=name, correction=correction, ref_kl=kl, rollout_kl=kl)
    reads: Counter[str] = Counter()
    with counting(reads):
        inputs = replace(tokens(), sequences=2)
        output = objective(config, inputs)
        terms = batch_terms(output.terms, output.loss_sum, loss_tokens=4, echo_tokens=4)
        sum(terms.values()).backward()
    assert inputs.logprobs.grad is not None
    assert reads == {}
