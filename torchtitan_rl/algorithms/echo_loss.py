"""Loss of the tokens that echo; echo.py, which needs no torch, chooses them."""

import torch

from torchtitan_rl.algorithms.policy_loss import LossOutput
from torchtitan_rl.core.metrics import Distribution, Sum


def echo_loss(logprobs: torch.Tensor, alphas: torch.Tensor | None) -> LossOutput:
    """Echo loss -Σ alpha·t over the tokens that echo; 0 without metrics if there are none.

    Example:
        >>> echo_loss(torch.tensor([-2.0]), torch.tensor([0.5])).loss_sum
        tensor(1.)
    """
    if alphas is None:
        return LossOutput(logprobs.sum() * 0.0)
    return LossOutput(
        -(alphas * logprobs).sum(),
        {"echo_nll": Distribution.of(-logprobs), "echo_tokens": Sum(float(logprobs.numel()))},
    )
