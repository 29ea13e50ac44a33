"""Off-policy correction: masks and weights for tokens on which trainer and generator disagree.

Trainer and generator compute the same policy with different kernels, and asynchronous runs sample
with older weights. w = exp(o - g) is the ratio of the two, per token. Masks change which tokens
train, never the divisor of the loss.
"""

from dataclasses import dataclass, field

import torch

from torchtitan_rl.algorithms.policy_loss import sequence_means, sequence_sums
from torchtitan_rl.config.correction import CorrectionConfig
from torchtitan_rl.core.metrics import Distribution, Mean, Metrics


@dataclass(slots=True)
class Corrected:
    """Result of a correction for one microbatch; all tensors are [tokens]."""

    weights: torch.Tensor
    """Factor of each token's loss; 0 where a mask drops the token."""
    high: torch.Tensor
    """Tokens that are masked, or capped, because a ratio is too high."""
    low: torch.Tensor
    """Tokens that are masked because a ratio is too low."""
    metrics: Metrics = field(default_factory=dict)

    def mask(self, name: str, high: torch.Tensor, low: torch.Tensor) -> None:
        """Mask the tokens whose ratio is too high or too low."""
        outside = high | low
        masked = ((self.weights > 0) & outside).sum()
        self.metrics[f"correction/{name}_share"] = Mean(masked, float(outside.numel()))
        self.weights = self.weights * ~outside
        self.high, self.low = self.high | high, self.low | low


def correction_weights(
    config: CorrectionConfig,
    old_logprobs: torch.Tensor,
    generator_logprobs: torch.Tensor,
    sequence_ids: torch.Tensor,
    sequences: int | None = None,
) -> Corrected:
    """Factors for the loss of each token; all tensors are [tokens], without gradient. `sequences`
    is their number, if it is known.

    Masks look at all tokens of a sequence, also at those that an earlier mask has left out. A share
    in the metrics counts the tokens that a mask leaves out and no earlier one has.
    """
    log_w = (old_logprobs - generator_logprobs).detach().float().clamp(-20.0, 20.0)
    w = log_w.exp()
    none = torch.zeros_like(w, dtype=torch.bool)
    done = Corrected(torch.ones_like(w), high=none, low=none)
    if config.sequence_outliers != "off":
        high, low = (
            sequence_sums(outliers.float(), sequence_ids, sequences) > 0
            for outliers in _outside(config, "sequence_outliers", w)
        )
        done.mask("sequence_outliers", high, low)
    if config.token_mask != "off":
        done.mask("token_mask", *_outside(config, "token_mask", w))
    if config.importance_weight != "off":
        by_token = config.importance_weight == "token"
        importance = w if by_token else sequence_sums(log_w, sequence_ids, sequences).exp()
        done.high = done.high | (importance > config.cap)
        importance = importance.clamp(max=config.cap)
        done.metrics["correction/importance_weight"] = Distribution.of(importance)
        done.weights = done.weights * importance
    if config.sequence_mask != "off":
        over = sequence_means if config.sequence_mask == "geometric" else sequence_sums
        value = over(log_w, sequence_ids, sequences).exp()
        done.mask("sequence_mask", *_outside(config, "sequence_mask", value))
    return done


def _outside(
    config: CorrectionConfig, mask: str, w: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each value is too high, and too low, for a mask that is on."""
    low, high = config.bounds(mask)
    return w > high, w < low
