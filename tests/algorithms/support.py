"""Tokens for a loss, from plain lists."""

import torch

from torchtitan_rl.algorithms.policy_loss import LossInputs


def loss_inputs(
    t, *, o=None, g=None, ref=None, advantages=1.0, weights=1.0, sequences=None, dtype=torch.float64
):
    """LossInputs of these logprobs; one number stands for all tokens, and o is t unless given."""

    def stream(values):
        if isinstance(values, int | float):
            values = [values] * len(t)
        return torch.tensor(values, dtype=dtype)

    logprobs = stream(t).requires_grad_()
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=logprobs.detach().clone() if o is None else stream(o),
        advantages=stream(advantages),
        weights=stream(weights),
        sequence_ids=torch.tensor(sequences or [0] * len(t), dtype=torch.int64),
        generator_logprobs=None if g is None else stream(g),
        ref_logprobs=None if ref is None else stream(ref),
    )


def gradient(output, inputs):
    """Gradient of the loss by each token's logprob."""
    return torch.autograd.grad(output.loss_sum, inputs.logprobs)[0].tolist()
