"""LossConfig: what it refuses, what it asks of a loss of one's own, what it needs of episodes."""

import pytest

from torchtitan_rl.algorithms.objective import check_loss, loss_needs
from torchtitan_rl.algorithms.policy_loss import LOSSES, LossOutput
from torchtitan_rl.config import CorrectionConfig, KLConfig, LossConfig
from torchtitan_rl.config.loss import REDUCTIONS
from torchtitan_rl.core.metrics import Mean

KL = KLConfig(coef=0.1)
CORRECTION = CorrectionConfig(importance_weight="token")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "grop"}, "unknown loss 'grop'; did you mean 'grpo'"),
        ({"name": "xyz"}, "Known: cispo, dapo, dppo, dual_clip, grpo, gspo, reinforce, sapo"),
        ({"name": "no.such:f"}, "cannot import 'no.such'"),
        ({"name": "math:sqr"}, "did you mean 'sqrt'"),
        ({"kwargs": {"clip_low": -0.1}}, "loss.kwargs.clip_low must be a number 0 to 1; got -0.1"),
        ({"kwargs": {"clip_low": 1.1}}, "loss.kwargs.clip_low must be a number 0 to 1; got 1.1"),
        ({"kwargs": {"clip_high": -1}}, "loss.kwargs.clip_high must be a number from 0 up; got -1"),
        ({"kwargs": {"clip_low": "0.2"}}, "clip_low must be a number 0 to 1; got '0.2'"),
        ({"kwargs": {"clip_high": float("nan")}}, "clip_high must be a number from 0 up; got nan"),
        (
            {"kwargs": {"clip_hi": 0.3}},
            "loss 'grpo' cannot take kwargs.*clip_hi.*it takes clip_low, clip_high",
        ),
        ({"name": "dual_clip", "kwargs": {"c": 0.5}}, "c must be a number from 1.01 up; got 0.5"),
        ({"name": "dppo", "kwargs": {"delta_high": 1.5}}, "delta_high must be a number 0 to 1"),
        ({"name": "dppo", "kwargs": {"delta_low": 1.5}}, "delta_low must be a number 0 to 1"),
        ({"name": "dppo", "kwargs": {"clip_low": 0.2}}, "loss 'dppo' cannot take kwargs.*clip_low"),
        ({"name": "sapo", "kwargs": {"tau_positive": 0}}, "tau_positive must be a number 1e-06 to"),
        (
            {"name": "sapo", "kwargs": {"tau_negative": -1}},
            "tau_negative must be a number 1e-06",
        ),
        ({"name": "reinforce", "kwargs": {"c": 3}}, "loss 'reinforce' cannot take kwargs.*'c'"),
        ({"reduction": "mean"}, "unknown reduction 'mean'.*Known: fixed_length, prompt_mean, seq"),
        ({"reduction": "token_means"}, "unknown reduction.*did you mean 'token_mean'"),
    ],
)
def test_a_bad_loss_is_refused_in_the_config(settings, message):
    with pytest.raises(ValueError, match=message):
        check_loss(LossConfig(**settings))


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        *((name, {}) for name in LOSSES),
        ("grpo", {"clip_low": 0, "clip_high": 4}),
        ("cispo", {"clip_low": 1.0, "clip_high": 9.0}),
        ("dual_clip", {"c": 1.5}),
        ("dppo", {"delta_low": 1, "delta_high": 0.0}),
        ("sapo", {"tau_positive": 0.5, "tau_negative": 2}),
    ],
)
def test_a_good_loss_is_accepted(name, kwargs):
    assert LossConfig(name=name, kwargs=kwargs).kwargs == kwargs


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_reduction_is_accepted(reduction):
    assert LossConfig(reduction=reduction).reduction == reduction


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({}, {}),
        ({"name": "dppo"}, {"token_logprobs": "trainer.loss.name dppo"}),
        ({"rollout_kl": KL}, {"token_logprobs": "trainer.loss.rollout_kl"}),
        ({"correction": CORRECTION}, {"token_logprobs": "trainer.loss.correction"}),
        ({"ref_kl": KL}, {"ref_logprobs": "trainer.loss.ref_kl"}),
        (
            {"rollout_kl": KL, "ref_kl": KL},
            {
                "token_logprobs": "trainer.loss.rollout_kl",
                "ref_logprobs": "trainer.loss.ref_kl",
            },
        ),
        ({"rollout_kl": KLConfig(coef=0.0)}, {}),
    ],
)
def test_what_episodes_must_carry_and_which_setting_wants_it(settings, needs):
    assert LossConfig(**settings).needs() == needs


@pytest.mark.parametrize(
    ("settings", "uses_ratios"),
    [
        *(({"name": name}, name != "reinforce") for name in LOSSES),
        ({"name": "reinforce", "rollout_kl": KL}, True),
        ({"name": "reinforce", "correction": CORRECTION}, True),
        ({"name": "reinforce", "ref_kl": KL}, False),
        # Nobody knows what a function of one's own computes.
        ({"name": f"{__name__}:good"}, True),
    ],
)
def test_whether_truncated_sampling_would_bias_it(settings, uses_ratios):
    assert LossConfig(**settings).uses_ratios is uses_ratios


def test_notices_name_the_term():
    k1 = KLConfig(coef=0.1, estimator="k1")
    first, second = LossConfig(rollout_kl=k1, ref_kl=k1).notices()
    assert "loss.rollout_kl.estimator is k1" in first
    assert "loss.ref_kl.estimator is k1" in second
    assert LossConfig(rollout_kl=KL, ref_kl=KL).notices() == []


@pytest.mark.parametrize("name", LOSSES)
def test_a_mean_over_tokens_is_noted_where_the_authors_mean_sequences(name):
    notices = LossConfig(name=name, reduction="token_mean").notices()
    if name not in ("gspo", "sapo"):
        assert notices == []
        return
    assert f"loss.name {name} with loss.reduction token_mean" in notices[0]
    assert "trainer.loss.reduction sequence_mean" in notices[0]
    for reduction in REDUCTIONS[1:]:
        assert LossConfig(name=name, reduction=reduction).notices() == []


# Losses of one's own, found by this module's import path.


def good(inputs, *, power=1.0):
    loss = -inputs.advantages * inputs.logprobs.abs() ** power
    tokens = float(loss.numel())
    return LossOutput(inputs.total(loss), {"loss/mine": Mean(loss.sum().item(), tokens)})


def bare_tensor(inputs):
    return inputs.total(inputs.logprobs)


def a_number(inputs):
    return LossOutput(inputs.total(inputs.logprobs).item())


def forgot_to_return(inputs):
    return None


def per_token(inputs):
    return LossOutput(inputs.logprobs * inputs.weights)


def not_a_number(inputs):
    return LossOutput(inputs.total((inputs.logprobs - 1).log()))


def mean_over_tokens(inputs):
    return LossOutput((inputs.logprobs * inputs.weights).mean())


def detached(inputs):
    return LossOutput(inputs.total(inputs.logprobs.detach()))


def raises(inputs):
    raise KeyError("rewards")


def needs_a_token(inputs):
    return LossOutput(inputs.total(inputs.logprobs - inputs.logprobs.max()))


def ignores_weights(inputs):
    return LossOutput((-inputs.advantages * inputs.logprobs).sum())


def holds_by_number(inputs):
    return LossOutput(inputs.total(-inputs.logprobs), high=inputs.advantages)


def metric_is_a_float(inputs):
    return LossOutput(inputs.total(inputs.logprobs), {"loss/mine": 0.5})


def reads_reference(inputs):
    return LossOutput(inputs.total(inputs.logprobs - inputs.ref_logprobs))


def reads_generator(inputs):
    return LossOutput(inputs.total(inputs.logprobs - inputs.generator_logprobs))


def infinite_slope(inputs):
    return LossOutput(inputs.total((inputs.logprobs - inputs.old_logprobs).sqrt()))


def no_metrics(inputs):
    return LossOutput(inputs.total(inputs.logprobs), None)


def test_what_a_loss_of_ones_own_reads_is_found_out():
    config = LossConfig(name=f"{__name__}:reads_generator")
    assert loss_needs(config) == {"token_logprobs": f"trainer.loss.name {config.name}"}
    assert loss_needs(LossConfig(name=f"{__name__}:good")) == {}
    config = LossConfig(name=f"{__name__}:reads_reference", ref_kl=KL)
    assert loss_needs(config) == {"ref_logprobs": "trainer.loss.ref_kl"}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("bare_tensor", r"must return a LossOutput\(loss_sum, metrics\); got tensor"),
        ("a_number", r"must return a LossOutput\(loss_sum, metrics\); got LossOutput"),
        ("forgot_to_return", r"must return a LossOutput\(loss_sum, metrics\); got None"),
        ("per_token", r"must return a finite scalar loss_sum; got tensor\(\["),
        ("not_a_number", r"must return a finite scalar loss_sum; got nan"),
        ("mean_over_tokens", r"got nan on a trial batch of 0 tokens .*inputs.total, not mean"),
        ("detached", "loss_sum has no gradient; build it from inputs.logprobs"),
        (
            "raises",
            r"3 tokens .*test_loss_config.py:\d+: KeyError\('rewards'\); its inputs have logprobs,",
        ),
        ("reads_reference", "failed on a trial batch of 3 tokens .*without trainer.loss.ref_kl"),
        ("infinite_slope", "gradient of loss_sum is not finite"),
        ("no_metrics", "metrics must be a dict; got None"),
        ("holds_by_number", "high must be a bool for each token; got torch.float32"),
        ("needs_a_token", "failed on a trial batch of 0 tokens"),
        ("ignores_weights", "leaves out inputs.weights"),
        ("metric_is_a_float", r"metric 'loss/mine' is 0.5; give it as Mean\(total, weight\)"),
    ],
)
def test_a_loss_of_ones_own_that_would_break_on_a_rank_is_refused(function, message):
    name = f"{__name__}:{function}"
    with pytest.raises(ValueError, match=message) as error:
        check_loss(LossConfig(name=name))
    assert f"loss '{name}'" in str(error.value)


@pytest.mark.parametrize("kwargs", [{}, {"power": 2.0}])
def test_a_right_loss_of_ones_own_is_accepted_with_its_arguments(kwargs):
    check_loss(LossConfig(name=f"{__name__}:good", kwargs=kwargs))


def test_arguments_that_a_loss_of_ones_own_does_not_take_are_refused():
    with pytest.raises(ValueError, match=r"test_loss_config:good' cannot take kwargs.*'powr'"):
        check_loss(LossConfig(name=f"{__name__}:good", kwargs={"powr": 2.0}))
