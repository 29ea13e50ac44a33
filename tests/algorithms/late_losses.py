"""Losses that pass their trial, and fail in training."""

import torch

from torchtitan_rl.algorithms.policy_loss import LossOutput


def raises(inputs):
    """Fails for two tokens: a trial has three, and none."""
    if len(inputs.logprobs) == 2:
        raise KeyError("two tokens")
    return LossOutput(inputs.total(-inputs.advantages * inputs.logprobs))


def returns_a_tensor(inputs):
    output = raises(inputs)
    return output.loss_sum if len(inputs.logprobs) == 1 else output


def gives_nan(inputs):
    """The logarithm of 0, where an advantage is 0.5."""
    return LossOutput(inputs.total(inputs.logprobs * (inputs.advantages - 0.5).abs().log() * 0.0))


def has_a_bad_gradient(inputs):
    """The root of 0 is finite, and its slope is not."""
    return LossOutput(inputs.total((inputs.logprobs - inputs.old_logprobs).abs().sqrt()))


def is_a_constant(inputs):
    return LossOutput(inputs.total(-inputs.logprobs) + torch.tensor(float("nan")))
