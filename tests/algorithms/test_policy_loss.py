"""Every policy loss, in values and in gradients: by hand, by a plain reference, by differences."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy, log_softmax

from tests.algorithms.support import gradient, loss_inputs
from torchtitan_rl.algorithms.policy_loss import (
    LOSSES,
    clipped,
    sequence_means,
    sequence_sums,
)
from torchtitan_rl.core.metrics import flatten

NAN = math.nan


def token(ratio, advantage):
    """Loss inputs of one token with t = -1 and this ρ; its generator logprob must not matter."""
    return loss_inputs([-1.0], o=[-1.0 - math.log(ratio)], g=[NAN], advantages=[advantage])


@pytest.mark.parametrize(
    ("name", "kwargs", "ratio", "advantage", "loss", "slope"),
    [
        ("grpo", {}, 1.0, 1.0, -1.0, -1.0),
        ("grpo", {}, 1.0, -2.0, 2.0, 2.0),
        ("grpo", {}, 1.1, 1.0, -1.1, -1.1),
        ("grpo", {}, 0.9, -1.0, 0.9, 0.9),
        # Outside on the side where more would be gained: clipped, and no gradient.
        ("grpo", {}, 1.5, 1.0, -1.2, 0.0),
        ("grpo", {}, 0.5, -1.0, 0.8, 0.0),
        # Outside on the other side: the way back stays open.
        ("grpo", {}, 1.5, -1.0, 1.5, 1.5),
        ("grpo", {}, 0.5, 1.0, -0.5, -0.5),
        ("grpo", {}, 3.0, 0.0, 0.0, 0.0),
        # Each bound moves alone.
        ("grpo", {"clip_high": 0.28}, 1.25, 2.0, -2.5, -2.5),
        ("grpo", {"clip_high": 0.28}, 0.5, -2.0, 1.6, 0.0),
        ("grpo", {"clip_low": 0.4}, 0.7, -2.0, 1.4, 1.4),
        ("grpo", {"clip_low": 0.4}, 0.5, -2.0, 1.2, 0.0),
        ("grpo", {"clip_low": 0.4}, 1.5, 2.0, -2.4, 0.0),
        ("dapo", {}, 1.25, 2.0, -2.5, -2.5),
        ("dapo", {}, 1.5, 2.0, -2.56, 0.0),
        ("dapo", {}, 0.5, -2.0, 1.6, 0.0),
        # At most c·|A|, for A < 0 alone.
        ("dual_clip", {}, 2.0, -1.0, 2.0, 2.0),
        ("dual_clip", {}, 5.0, -1.0, 3.0, 0.0),
        ("dual_clip", {}, 5.0, -2.0, 6.0, 0.0),
        ("dual_clip", {"c": 1.5}, 2.0, -2.0, 3.0, 0.0),
        ("dual_clip", {}, 5.0, 1.0, -1.2, 0.0),
        ("dual_clip", {}, 0.5, -1.0, 0.8, 0.0),
        ("dual_clip", {}, 5.0, 0.0, 0.0, 0.0),
        ("gspo", {}, 1.1, 2.0, -2.2, -2.2),
        ("gspo", {}, 1.5, 2.0, -2.4, 0.0),
        ("gspo", {}, 9.0, -1.0, 9.0, 9.0),
        # Not the ratio but its logarithm is at most 10.
        ("gspo", {}, math.exp(3), -1.0, math.exp(3), math.exp(3)),
        ("gspo", {}, math.exp(9.9), -1.0, math.exp(9.9), math.exp(9.9)),
        ("gspo", {}, math.exp(12), -1.0, math.exp(10), 0.0),
        # ρ only weighs, between 0 and 5; t = -1 carries the gradient.
        ("cispo", {}, 1.0, 1.0, 1.0, -1.0),
        ("cispo", {}, 2.0, 1.0, 2.0, -2.0),
        ("cispo", {}, 8.0, 1.0, 5.0, -5.0),
        ("cispo", {}, 8.0, -3.0, -15.0, 15.0),
        ("cispo", {}, 0.01, 1.0, 0.01, -0.01),
        ("cispo", {"clip_low": 0.2}, 0.5, -1.0, -0.8, 0.8),
        ("cispo", {"clip_high": 0.5}, 2.0, 2.0, 3.0, -3.0),
        # σ(0) = 1/2, σ(2) = 0.880797, σ(2.1) = 0.890903, σ(1) = 0.731059
        ("sapo", {}, 1.0, 1.0, -2.0, -1.0),
        ("sapo", {}, 1.0, -1.0, 2 / 1.05, 1.0),
        ("sapo", {}, 3.0, 1.0, -3.523188, -1.259923),
        ("sapo", {}, 3.0, -1.0, 3.393917, 1.166336),
        ("sapo", {"tau_positive": 2.0}, 1.5, 1.0, -1.462117, -1.179672),
        ("sapo", {"tau_negative": 2.0}, 1.5, -1.0, 1.462117, 1.179672),
        ("sapo", {}, 3.0, 0.0, 0.0, 0.0),
        ("reinforce", {}, 1.0, 2.0, 2.0, -2.0),
        ("reinforce", {}, 7.0, -3.0, -3.0, 3.0),
    ],
)
def test_the_loss_of_one_token_and_its_gradient(name, kwargs, ratio, advantage, loss, slope):
    inputs = token(ratio, advantage)
    output = LOSSES[name](inputs, **kwargs)
    assert output.loss_sum.item() == pytest.approx(loss, rel=1e-6)
    assert gradient(output, inputs) == pytest.approx([slope], rel=1e-6)


@pytest.mark.parametrize(
    ("trainer", "generator", "kwargs", "advantage", "loss", "slope"),
    [
        (0.5, 0.5, {}, 2.0, -2.0, -2.0),
        (0.5, 0.4, {}, 1.0, -1.25, -1.25),
        # Probability moved by more than 0.2 the way A pushes: nothing to learn here.
        (0.5, 0.25, {}, 1.0, 0.0, 0.0),
        (0.25, 0.5, {}, -1.0, 0.0, 0.0),
        (0.25, 0.5, {}, 0.0, 0.0, 0.0),
        # The way back stays open.
        (0.5, 0.25, {}, -1.0, 2.0, 2.0),
        (0.25, 0.5, {}, 1.0, -0.5, -0.5),
        # An unlikely token is free to move, whatever its ratio.
        (0.04, 0.01, {}, 1.0, -4.0, -4.0),
        (0.5, 0.25, {"delta_high": 0.3}, 1.0, -2.0, -2.0),
        (0.5, 0.25, {"delta_low": 0.3}, 1.0, 0.0, 0.0),
        (0.25, 0.5, {"delta_low": 0.3}, -1.0, 0.5, 0.5),
        (0.25, 0.5, {"delta_high": 0.3}, -1.0, 0.0, 0.0),
    ],
)
def test_dppo_of_one_token_and_its_gradient(trainer, generator, kwargs, advantage, loss, slope):
    inputs = loss_inputs(
        [math.log(trainer)], o=[NAN], g=[math.log(generator)], advantages=[advantage]
    )
    output = LOSSES["dppo"](inputs, **kwargs)
    assert output.loss_sum.item() == pytest.approx(loss)
    assert gradient(output, inputs) == pytest.approx([slope])


def test_gspo_gives_each_token_the_geometric_mean_of_its_sequences_ratios():
    # Sequences interleave; their ratios' means are 1.1 and 1.5: the second is clipped.
    ratios = [1.1, 1.5, 0.55, 0.75, 2.2, 3.0]
    inputs = loss_inputs(
        [-1.0] * 6, o=[-1 - math.log(r) for r in ratios], sequences=[0, 1, 0, 1, 0, 1]
    )
    output = LOSSES["gspo"](inputs)
    assert output.loss_sum.item() == pytest.approx(3 * -1.1 + 3 * -1.2)
    assert gradient(output, inputs) == pytest.approx([-1.1, 0, -1.1, 0, -1.1, 0])
    assert flatten(output.metrics)["loss/masked_high_share"] == pytest.approx(0.5)


def plain_clip(ratio, a, low, high):
    return -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)


def plain_dual_clip(ratio, a):
    loss = plain_clip(ratio, a, 0.2, 0.2)
    return min(loss, -3 * a) if a < 0 else loss


def plain_gspo(t, mean, a):
    log_ratio = t - t.item() + mean
    return plain_clip(torch.exp(log_ratio if mean < 10 else 0 * t + 10), a, 0.2, 0.2)


def plain_dppo(t, g, a):
    moved = math.exp(t.item()) - math.exp(g)
    held = moved > 0.2 if a > 0 else moved < -0.2
    return 0 * t if held else -torch.exp(t - g) * a


def plain_sapo(ratio, a):
    tau = 1.0 if a > 0 else 1.05
    return -a * 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))


PLAIN = {
    "grpo": lambda t, o, g, a, mean: plain_clip(torch.exp(t - o), a, 0.2, 0.2),
    "dapo": lambda t, o, g, a, mean: plain_clip(torch.exp(t - o), a, 0.2, 0.28),
    "dual_clip": lambda t, o, g, a, mean: plain_dual_clip(torch.exp(t - o), a),
    "gspo": lambda t, o, g, a, mean: plain_gspo(t, mean, a),
    "cispo": lambda t, o, g, a, mean: -a * min(max(math.exp(t.item() - o), 0), 5) * t,
    "dppo": lambda t, o, g, a, mean: plain_dppo(t, g, a),
    "sapo": lambda t, o, g, a, mean: plain_sapo(torch.exp(t - o), a),
    "reinforce": lambda t, o, g, a, mean: -a * t,
}
"""One token's loss with the default arguments; `mean` is that of t - o over its sequence."""

# Every case of ratio x sign of A, away from the kinks at 0.8, 1.2, 1.28, 3 and 5. By sequence: a
# mean ratio inside the bounds, above and below them, for A > 0 and A < 0, and A = 0; and means of
# t - o below and above 10.
RATIOS = [0.3, 0.7, 0.9, 1.0, 1.1, 1.25, 1.6, 4.0, 6.0]
BY_SEQUENCE = [
    (RATIOS, 1.5, 1.0),
    (RATIOS, -0.7, 0.5),
    ([1.6, 1.9], 0.4, 2.0),
    ([1.6, 1.9], -2.0, 0.3),
    ([0.3, 0.7], 1.2, 0.25),
    ([0.3, 0.7], -0.9, 1.5),
    ([0.9, 1.9, 0.3], 0.0, 1.0),
    ([math.exp(2), math.exp(4)], -1.0, 0.5),
    ([math.exp(9), math.exp(12)], -1.0, 0.5),
]


def many_tokens():
    rows = [
        (ratio, advantage, weight, sequence)
        for sequence, (ratios, advantage, weight) in enumerate(BY_SEQUENCE)
        for ratio in ratios
    ]
    ratios, advantages, weights, sequences = map(list, zip(*rows, strict=True))
    t = torch.linspace(-2.5, -0.05, len(rows), dtype=torch.float64).tolist()
    return loss_inputs(
        t,
        o=[x - math.log(ratio) for x, ratio in zip(t, ratios, strict=True)],
        # dppo: exp(t) - exp(g) takes values on both sides of -0.2 and 0.2
        g=[x + [0.6, -0.4, 0.1, -0.9][i % 4] for i, x in enumerate(t)],
        advantages=advantages,
        weights=weights,
        sequences=sequences,
    )


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_agree_with_a_plain_reference(name):
    inputs = many_tokens()
    o, g = inputs.old_logprobs.tolist(), inputs.generator_logprobs.tolist()
    sequences = inputs.sequence_ids.tolist()
    expected = 0
    for i, t in enumerate(inputs.logprobs):
        own = [j for j, sequence in enumerate(sequences) if sequence == sequences[i]]
        mean = sum(inputs.logprobs[j].item() - o[j] for j in own) / len(own)
        a, weight = inputs.advantages[i].item(), inputs.weights[i].item()
        expected = expected + weight * PLAIN[name](t, o[i], g[i], a, mean)
    (slopes,) = torch.autograd.grad(expected, inputs.logprobs)
    output = LOSSES[name](inputs)
    assert output.loss_sum.item() == pytest.approx(expected.item(), rel=1e-6)
    assert gradient(output, inputs) == pytest.approx(slopes.tolist(), rel=1e-6)
    assert min(map(abs, slopes.tolist())) == 0 < max(map(abs, slopes.tolist()))


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("grpo", {}),
        ("grpo", {"clip_low": 0.05, "clip_high": 0.4}),
        ("dapo", {}),
        ("dual_clip", {}),
        # As A and the weight are one for a sequence, what stands still in the gradient of a token
        # comes in through the others.
        ("gspo", {}),
        # With bounds as tight as that ρ is 1; else it moves, and the gradient does not see it.
        ("cispo", {"clip_low": 0.0, "clip_high": 0.0}),
        ("dppo", {}),
        ("sapo", {}),
        ("reinforce", {}),
    ],
)
def test_the_gradient_agrees_with_finite_differences(name, kwargs):
    inputs = many_tokens()

    def loss(t):
        return LOSSES[name](replace(inputs, logprobs=t), **kwargs).loss_sum

    assert torch.autograd.gradcheck(loss, inputs.logprobs, eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_has_the_plain_policy_gradient(name):
    advantages = [1.0, -2.0, 0.5, 0.0]
    t = [-0.1, -1.0, -4.0, -0.5]
    inputs = loss_inputs(t, g=t, advantages=advantages, sequences=[0, 1, 1, 2])
    slopes = gradient(LOSSES[name](inputs), inputs)
    assert slopes == pytest.approx([-a for a in advantages], rel=1e-6)


def test_advantage_one_on_policy_has_the_gradient_of_cross_entropy():
    torch.manual_seed(0)
    logits = torch.randn(7, 11, requires_grad=True)
    targets = torch.randint(11, (7,))
    logprobs = log_softmax(logits, -1)[torch.arange(7), targets]
    inputs = loss_inputs(logprobs.tolist(), dtype=torch.float32)
    output = clipped(replace(inputs, logprobs=logprobs))
    (slopes,) = torch.autograd.grad(output.loss_sum, logits)
    (expected,) = torch.autograd.grad(cross_entropy(logits, targets, reduction="sum"), logits)
    torch.testing.assert_close(slopes, expected, rtol=1e-5, atol=1e-6)


def test_grpo_clips_alike_on_both_sides_and_dapo_is_grpo_with_more_room_upwards():
    inputs = many_tokens()
    grpo, dapo = LOSSES["grpo"](inputs), LOSSES["dapo"](inputs)
    symmetric = clipped(inputs, clip_low=0.2, clip_high=0.2)
    higher = clipped(inputs, clip_low=0.2, clip_high=0.28)
    assert grpo.loss_sum == symmetric.loss_sum
    assert dapo.loss_sum == higher.loss_sum
    assert gradient(dapo, inputs) == gradient(higher, inputs) != gradient(grpo, inputs)


@pytest.mark.parametrize("name", LOSSES)
def test_each_tokens_loss_is_multiplied_by_its_weight(name):
    inputs = many_tokens()
    tokens = len(inputs.weights)
    alone = [
        LOSSES[name](replace(inputs, weights=torch.eye(tokens)[i])).loss_sum.item()
        for i in range(tokens)
    ]
    weights = torch.linspace(0, 3, tokens, dtype=torch.float64)
    weighted = replace(inputs, weights=weights)
    output = LOSSES[name](weighted)
    expected = sum(w * loss for w, loss in zip(weights.tolist(), alone, strict=True))
    assert output.loss_sum.item() == pytest.approx(expected)
    plain = replace(inputs, weights=torch.ones(tokens))
    slopes = gradient(LOSSES[name](plain), plain)
    expected = [w * slope for w, slope in zip(weights.tolist(), slopes, strict=True)]
    assert gradient(output, weighted) == pytest.approx(expected)


@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens_give_a_loss_of_zero_that_still_runs_backward(name):
    inputs = loss_inputs([], g=[], ref=[])
    output = LOSSES[name](inputs)
    assert output.loss_sum.item() == 0
    assert gradient(output, inputs) == []
    assert flatten(output.metrics) == {}


HIGH_AND_LOW = {"loss/masked_high_share": 0.4, "loss/masked_low_share": 0.2}


@pytest.mark.parametrize(
    ("name", "kwargs", "ratios", "advantages", "shares"),
    [
        ("grpo", {}, [1.5, 2, 0.5, 1.5, 0.5], [1, 1, -1, -1, 1], HIGH_AND_LOW),
        ("dapo", {}, [1.5, 2, 0.5, 1.25, 1], [1, 1, -1, 1, 1], HIGH_AND_LOW),
        # A ratio above c counts as too high, though A < 0.
        ("dual_clip", {}, [1.5, 5, 0.5, 2, 1], [1, -1, -1, -1, 1], HIGH_AND_LOW),
        ("gspo", {}, [1.5, 2, 0.5, 1.5, 0.5], [1, 1, -1, -1, 1], HIGH_AND_LOW),
        ("cispo", {"clip_low": 0.2}, [6, 7, 0.5, 4, 1], [1, -1, 1, 1, 1], HIGH_AND_LOW),
        ("sapo", {}, [9, 0.1, 1, 1, 1], [1, -1, 1, 1, 1], {}),
        ("reinforce", {}, [9, 0.1, 1, 1, 1], [1, -1, 1, 1, 1], {}),
    ],
)
def test_the_shares_of_tokens_held_back_are_reported(name, kwargs, ratios, advantages, shares):
    o = [-1 - math.log(ratio) for ratio in ratios]
    inputs = loss_inputs([-1.0] * 5, o=o, advantages=advantages, sequences=[0, 1, 2, 3, 4])
    assert flatten(LOSSES[name](inputs, **kwargs).metrics) == pytest.approx(shares)


def test_dppo_reports_the_shares_of_tokens_held_back():
    trainer, generator = [0.5, 0.9, 0.25, 0.5, 0.25], [0.25, 0.1, 0.5, 0.25, 0.5]
    inputs = loss_inputs(
        list(map(math.log, trainer)), g=list(map(math.log, generator)), advantages=[1, 1, -1, -1, 1]
    )
    assert flatten(LOSSES["dppo"](inputs).metrics) == pytest.approx(HIGH_AND_LOW)


@pytest.mark.parametrize("name", LOSSES)
def test_only_a_loss_that_says_so_needs_generator_logprobs(name):
    inputs = replace(many_tokens(), generator_logprobs=None)
    if name == "dppo":
        with pytest.raises(ValueError, match="dppo needs logprobs that these episodes do not have"):
            LOSSES[name](inputs)
    else:
        assert LOSSES[name](inputs).loss_sum.isfinite()


@pytest.mark.parametrize(
    ("values", "sequences", "sums", "means"),
    [
        ([1, 2, 3], [0, 0, 0], [6, 6, 6], [2, 2, 2]),
        ([1, 2, 3], [0, 0, 1], [3, 3, 3], [1.5, 1.5, 3]),
        ([1, 2, 3, 4], [0, 1, 0, 1], [4, 6, 4, 6], [2, 3, 2, 3]),
        ([1, 2, 3], [2, 0, 2], [4, 2, 4], [2, 2, 2]),
        ([], [], [], []),
    ],
)
def test_sums_and_means_over_the_tokens_of_a_sequence(values, sequences, sums, means):
    per_token = torch.tensor(values, dtype=torch.float32)
    ids = torch.tensor(sequences, dtype=torch.int64)
    assert sequence_sums(per_token, ids).tolist() == sums
    inputs = loss_inputs(values, sequences=sequences)
    assert sequence_means(per_token, inputs.sequence_ids).tolist() == means
    # Given their number, of which some may have no token here.
    assert sequence_sums(per_token, ids, 5).tolist() == sums
    assert sequence_means(per_token, ids, 5).tolist() == means
