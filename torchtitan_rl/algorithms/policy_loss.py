"""Policy losses: functions from per-token tensors to one sum, which the caller divides by N once.

Notation, per token: t = trainer logprob (with gradient), o = trainer logprob under the weights at
the start of the step, g = generator logprob at sampling time, A = advantage; ρ = exp(t - o),
r = exp(t - g). Ratios are computed in fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torchtitan_rl.core.metrics import Mean, Metrics


@dataclass(slots=True)
class LossInputs:
    """Tokens of one microbatch that train by RL, flattened to [tokens], fp32.

    Padding and prompts are left out, so nothing has to be masked. `total` sums a loss.
    """

    logprobs: torch.Tensor
    """t, with gradient"""
    old_logprobs: torch.Tensor
    """o, constant"""
    advantages: torch.Tensor
    """A, constant"""
    weights: torch.Tensor
    """Factor of each token's loss: the reduction's weight times the correction's; 0 for a token
    that a correction has masked."""
    sequence_ids: torch.Tensor
    """Number of the sequence that a token belongs to, from 0 up: int64"""
    generator_logprobs: torch.Tensor | None = None
    """g, constant; None for tokens that were not sampled (demonstrations)"""
    ref_logprobs: torch.Tensor | None = None
    """logprob under the frozen reference model, constant; None without one"""
    sequences: int | None = None
    """Number of sequences in the microbatch, for `sequence_sums`; None: read off `sequence_ids`"""

    def total(self, per_token: torch.Tensor) -> torch.Tensor:
        """Weighted sum of a per-token loss, which a loss function returns as `loss_sum`."""
        return (per_token * self.weights).sum()


def sequence_sums(
    per_token: torch.Tensor, sequence_ids: torch.Tensor, sequences: int | None = None
) -> torch.Tensor:
    """For each token, the sum over the tokens of its sequence. Without the number of sequences it
    is read from the largest id, for which a GPU is waited for.

    Example:
        >>> sequence_sums(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 1]))
        tensor([3., 3., 3.])
    """
    if not sequence_ids.numel():
        return per_token
    if sequences is None:
        sequences = int(sequence_ids.max()) + 1
    sums = per_token.new_zeros(sequences)
    return sums.index_add(0, sequence_ids, per_token)[sequence_ids]


def sequence_means(
    per_token: torch.Tensor, sequence_ids: torch.Tensor, sequences: int | None = None
) -> torch.Tensor:
    """For each token, the mean over the tokens of its sequence."""
    counts = sequence_sums(torch.ones_like(per_token), sequence_ids, sequences)
    return sequence_sums(per_token, sequence_ids, sequences) / counts


@dataclass(slots=True)
class LossOutput:
    """Result of a loss function for one microbatch."""

    loss_sum: torch.Tensor
    """Weighted sum over tokens, a scalar with gradient."""
    metrics: Metrics = field(default_factory=dict)
    high: torch.Tensor | None = None
    """[tokens] whether a token is clipped or left out because its ratio is too high. Optional, as
    `low` is; both are for the token export."""
    low: torch.Tensor | None = None
    """[tokens] whether a token is clipped or left out because its ratio is too low."""


LossFn = Callable[..., LossOutput]


def clipped(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2) -> LossOutput:
    """GRPO's loss: -min(ρA, clip(ρ, 1-ε_low, 1+ε_high)·A).

    Example:
        ρ = 1.5, A = 1: the loss is -1.2 and its gradient is 0; ρ = 1.5, A = -1: 1.5, not clipped.
    """
    return _clip(inputs, _ratio(inputs), clip_low, clip_high)


def clip_higher(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28
) -> LossOutput:
    """GRPO's loss with a higher upper limit, as in DAPO: unlikely tokens may still grow."""
    return clipped(inputs, clip_low=clip_low, clip_high=clip_high)


def dual_clip(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, c: float = 3.0
) -> LossOutput:
    """GRPO's loss, at most -c·A where A < 0, so that an extreme ratio cannot dominate the step."""
    return _clip(inputs, _ratio(inputs), clip_low, clip_high, most=c)


def gspo(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2) -> LossOutput:
    """GSPO's loss: clipped, with the sequence's ratio exp(t - sg(t) + sg(mean of t - o)), the
    logarithm of which is at most 10.

    Every token of a sequence has the same ratio, and its own gradient.

    Example:
        One token with t - o = 3, A = -1: the loss is e³ = 20.09, and so is its gradient.
    """
    t = inputs.logprobs
    moved = t.detach() - inputs.old_logprobs
    mean = sequence_means(moved, inputs.sequence_ids, inputs.sequences)
    log_ratio = (t - t.detach() + mean).clamp(max=10.0)
    return _clip(inputs, ratio_of(log_ratio), clip_low, clip_high)


def cispo(inputs: LossInputs, *, clip_low: float = 1.0, clip_high: float = 4.0) -> LossOutput:
    """CISPO's loss -A·sg(clamp(ρ, 1-ε_low, 1+ε_high))·t: clips the weight, never the gradient."""
    ratio = _ratio(inputs).detach()
    clamped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -inputs.advantages * clamped * inputs.logprobs
    return _held(inputs, loss, high=ratio > clamped, low=ratio < clamped)


def dppo(inputs: LossInputs, *, delta_low: float = 0.2, delta_high: float = 0.2) -> LossOutput:
    """DPPO's loss -r·A, but 0 where the trainer's *probability* has moved too far from the
    generator's in the direction of A.

    A trust region in probabilities leaves unlikely tokens free to move and limits likely ones.
    """
    t, advantages = inputs.logprobs, inputs.advantages
    g = required(inputs.generator_logprobs, "dppo")
    moved = (t.exp() - g.exp()).detach()
    high = (advantages > 0) & (moved > delta_high)
    low = (advantages <= 0) & (moved < -delta_low)
    kept = torch.where(high | low, 0.0, ratio_of(t - g))
    return _held(inputs, -kept * advantages, high=high, low=low)


def sapo(
    inputs: LossInputs, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> LossOutput:
    """SAPO's loss -A·(4/τ)·σ(τ(ρ-1)): a soft gate in place of the clip, with slope 1 at ρ = 1."""
    advantages = inputs.advantages
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    gate = torch.sigmoid(tau * (_ratio(inputs) - 1)) * 4 / tau
    return LossOutput(inputs.total(-advantages * gate))


def reinforce(inputs: LossInputs) -> LossOutput:
    """REINFORCE's loss -A·t: the plain policy gradient."""
    return LossOutput(inputs.total(-inputs.advantages * inputs.logprobs))


LOSSES: dict[str, LossFn] = {
    "grpo": clipped,
    "dapo": clip_higher,
    "dual_clip": dual_clip,
    "gspo": gspo,
    "cispo": cispo,
    "dppo": dppo,
    "sapo": sapo,
    "reinforce": reinforce,
}


def required(logprobs: torch.Tensor | None, who: str) -> torch.Tensor:
    """Logprobs that `who` needs; the controller has checked that episodes have them."""
    if logprobs is None:
        raise ValueError(f"{who} needs logprobs that these episodes do not have")
    return logprobs


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """Ratio exp(log_ratio), within e^±20: outside of every trust region, and never infinite, which
    times 0 would be NaN."""
    return log_ratio.clamp(-20.0, 20.0).exp()


def _ratio(inputs: LossInputs) -> torch.Tensor:
    return ratio_of(inputs.logprobs - inputs.old_logprobs)


def _clip(
    inputs: LossInputs,
    ratio: torch.Tensor,
    clip_low: float,
    clip_high: float,
    most: float | None = None,
) -> LossOutput:
    advantages = inputs.advantages
    free = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = -torch.minimum(free, bounded)
    masked = bounded < free
    if most is not None:
        ceiling = -most * advantages
        masked |= (advantages < 0) & (loss > ceiling)
        loss = torch.where(advantages < 0, torch.minimum(loss, ceiling), loss)
    return _held(inputs, loss, high=masked & (ratio > 1), low=masked & (ratio < 1))


def _held(
    inputs: LossInputs, loss: torch.Tensor, *, high: torch.Tensor, low: torch.Tensor
) -> LossOutput:
    """Output with the shares of tokens whose ratio a trust region finds too high or too low."""
    tokens = float(high.numel())
    shares: Metrics = {
        "loss/masked_high_share": Mean(high.sum(), tokens),
        "loss/masked_low_share": Mean(low.sum(), tokens),
    }
    return LossOutput(inputs.total(loss), shares, high, low)
