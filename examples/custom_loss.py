"""A loss of your own: imitate good samples, and push bad ones down only while they are likely.

torchtitan-rl train --module examples/custom_task.py --config palindromes_tiny \
    --trainer.loss.name custom_loss:tapered --trainer.loss.kwargs most 1.0
"""

import torch

from torchtitan_rl import LossInputs, LossOutput
from torchtitan_rl.algorithms.policy_loss import ratio_of, required
from torchtitan_rl.core.metrics import Distribution


def tapered(inputs: LossInputs, *, most: float = 1.0) -> LossOutput:
    """-A·t where A > 0, else -A·sg(min(r, most))·t: after TOPR, token by token.

    r = exp(t - g) falls to 0 as a token becomes less likely than when it was sampled, so that a
    push away from it ends; a push towards a token does not.
    """
    t, advantages = inputs.logprobs, inputs.advantages
    ratio = ratio_of(t.detach() - required(inputs.generator_logprobs, "tapered"))
    weight = torch.where(advantages > 0, 1.0, ratio.clamp(max=most))  # [tokens]
    return LossOutput(
        inputs.total(-advantages * weight * t),
        metrics={"loss/taper": Distribution.of(weight)},
    )
