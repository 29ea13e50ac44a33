"""The clipped loss and the logprobs it works on, in values and in gradients."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from torchtitan_rl.algorithms.policy_loss import LossConfig, LossInputs, clipped, token_logprobs
from torchtitan_rl.observability.metrics import flatten


def loss_and_gradient(ratios, advantages, **kwargs):
    """The loss at these ratios, and its gradient by the logprobs."""
    old = torch.linspace(-3, -0.5, len(ratios), dtype=torch.float64)
    logprobs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    inputs = LossInputs(logprobs, old, torch.tensor(advantages, dtype=torch.float64))
    output = clipped(inputs, **kwargs)
    output.loss_sum.backward()
    return output, logprobs.grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "bounds", "loss", "gradient"),
    [
        (1.0, 1.0, {}, -1.0, -1.0),
        (1.0, -2.0, {}, 2.0, 2.0),
        (1.1, 1.0, {}, -1.1, -1.1),
        (0.9, -1.0, {}, 0.9, 0.9),
        # Outside on the side where more would be gained: clipped, and no gradient.
        (1.5, 1.0, {}, -1.2, 0.0),
        (0.5, -1.0, {}, 0.8, 0.0),
        # Outside on the other side: the way back stays open.
        (1.5, -1.0, {}, 1.5, 1.5),
        (0.5, 1.0, {}, -0.5, -0.5),
        # Clip-higher: only the upper bound moves.
        (1.25, 2.0, {"clip_high": 0.28}, -2.5, -2.5),
        (1.5, 2.0, {"clip_high": 0.28}, -2.56, 0.0),
        (0.5, -2.0, {"clip_high": 0.28}, 1.6, 0.0),
        # Clip-lower: only the lower bound moves.
        (0.7, -2.0, {"clip_low": 0.4}, 1.4, 1.4),
        (0.5, -2.0, {"clip_low": 0.4}, 1.2, 0.0),
        (1.5, 2.0, {"clip_low": 0.4}, -2.4, 0.0),
        (3.0, 0.0, {}, 0.0, 0.0),
    ],
)
def test_clipped_value_and_gradient(ratio, advantage, bounds, loss, gradient):
    output, grad = loss_and_gradient([ratio], [advantage], **bounds)
    assert output.loss_sum.item() == pytest.approx(loss)
    assert grad.item() == pytest.approx(gradient)


# Every case of ratio x sign of A, well away from the kinks at 0.8 and 1.2 or 1.3.
RATIOS = [0.3, 0.7, 0.9, 1.0, 1.1, 1.25, 1.6, 0.3, 0.7, 0.9, 1.0, 1.1, 1.25, 1.6]
ADVANTAGES = [1.5, 0.2, 1.0, 2.0, 0.7, 0.3, 1.0, -1.5, -0.2, -1.0, -2.0, -0.7, -0.3, -1.0]


@pytest.mark.parametrize("bounds", [(0.2, 0.2), (0.2, 0.3), (0.05, 0.4)])
def test_clipped_agrees_with_a_plain_reference(bounds):
    low, high = bounds
    output, grad = loss_and_gradient(RATIOS, ADVANTAGES, clip_low=low, clip_high=high)
    expected, expected_grad = 0.0, []
    for ratio, advantage in zip(RATIOS, ADVANTAGES, strict=True):
        bounded = min(max(ratio, 1 - low), 1 + high)
        expected -= min(ratio * advantage, bounded * advantage)
        trains = ratio * advantage <= bounded * advantage
        expected_grad.append(-ratio * advantage if trains else 0.0)
    assert output.loss_sum.item() == pytest.approx(expected)
    assert grad.tolist() == pytest.approx(expected_grad)


def test_the_gradient_of_clipped_agrees_with_finite_differences():
    old = torch.linspace(-3, -0.5, len(RATIOS), dtype=torch.float64)
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    logprobs = (old + torch.tensor(RATIOS, dtype=torch.float64).log()).requires_grad_()

    def loss(t):
        return clipped(LossInputs(t, old, advantages)).loss_sum

    assert torch.autograd.gradcheck(loss, logprobs, eps=1e-6, atol=1e-6)


def test_advantage_one_on_policy_has_the_gradient_of_cross_entropy():
    torch.manual_seed(0)
    logits = torch.randn(7, 11, requires_grad=True)
    targets = torch.randint(11, (7,))
    logprobs, _ = token_logprobs(logits, targets, torch.ones(7))
    inputs = LossInputs(logprobs, logprobs.detach(), torch.ones(7))
    (grad,) = torch.autograd.grad(clipped(inputs).loss_sum, logits)
    (expected,) = torch.autograd.grad(cross_entropy(logits, targets, reduction="sum"), logits)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)


def test_the_loss_is_a_sum_over_tokens():
    whole, _ = loss_and_gradient(RATIOS, ADVANTAGES)
    parts = [loss_and_gradient([r], [a])[0] for r, a in zip(RATIOS, ADVANTAGES, strict=True)]
    assert whole.loss_sum.item() == pytest.approx(sum(p.loss_sum.item() for p in parts))


def test_the_share_of_clipped_tokens_is_reported():
    output, _ = loss_and_gradient([1.5, 1.5, 0.5, 1.0], [1.0, -1.0, -1.0, 1.0])
    assert flatten(output.metrics) == {"loss/clipped_share": 0.5}


def test_no_tokens_give_a_loss_of_zero_that_still_runs_backward():
    logprobs = torch.zeros(0, requires_grad=True)
    output = clipped(LossInputs(logprobs, logprobs.detach(), torch.zeros(0)))
    output.loss_sum.backward()
    assert output.loss_sum.item() == 0
    assert logprobs.grad.shape == (0,)
    assert flatten(output.metrics) == {}


LOGITS = [[0.5, -1.0, 2.0], [3.0, 3.0, -4.0], [0.0, 0.0, 0.0]]


def plain_softmax(logits, temperature):
    weights = [math.exp(logit / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("temperatures", [[1.0, 1.0, 1.0], [0.5, 1.0, 2.0], [0.7, 3.0, 0.1]])
def test_token_logprobs_and_entropy_agree_with_a_plain_reference(temperatures):
    targets = [2, 0, 1]
    logprobs, entropy = token_logprobs(
        torch.tensor(LOGITS), torch.tensor(targets), torch.tensor(temperatures)
    )
    chances = [plain_softmax(row, t) for row, t in zip(LOGITS, temperatures, strict=True)]
    expected = [math.log(row[target]) for row, target in zip(chances, targets, strict=True)]
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-5)
    expected_entropy = [-sum(p * math.log(p) for p in row) for row in chances]
    assert entropy.tolist() == pytest.approx(expected_entropy, abs=1e-5)


def test_each_token_has_its_own_temperature():
    logits, targets = torch.tensor(LOGITS), torch.tensor([2, 0, 1])
    temperatures = torch.tensor([0.5, 1.0, 2.0])
    together, _ = token_logprobs(logits, targets, temperatures)
    for i in range(3):
        alone, _ = token_logprobs(logits[[i]], targets[[i]], temperatures[[i]])
        assert together[i].item() == pytest.approx(alone.item())


def test_the_entropy_of_a_uniform_distribution_is_log_of_its_size():
    _, entropy = token_logprobs(torch.zeros(1, 50), torch.tensor([3]), torch.ones(1))
    assert entropy.item() == pytest.approx(math.log(50))


def test_logprobs_are_computed_in_float32_and_only_they_carry_a_gradient():
    logits = torch.randn(4, 9, dtype=torch.bfloat16, requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.zeros(4, dtype=torch.int64), torch.ones(4))
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert logprobs.requires_grad
    assert not entropy.requires_grad


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "grop"}, "unknown loss 'grop'; did you mean 'grpo'"),
        ({"name": "no.such:f"}, "cannot import 'no.such'"),
        ({"name": "math:sqr"}, "did you mean 'sqrt'"),
        (
            {"kwargs": {"clip_low": -0.1}},
            r"loss.kwargs.clip_low must be a number from 0 up; got -0.1",
        ),
        (
            {"kwargs": {"clip_high": -1}},
            r"loss.kwargs.clip_high must be a number from 0 up; got -1",
        ),
        ({"kwargs": {"clip_hi": 0.3}}, "clip_hi"),
        ({"kwargs": {"clip_low": "0.2"}}, "clip_low"),
    ],
)
def test_a_bad_loss_is_refused_in_the_config(settings, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**settings)
