"""Policy losses: per-token terms in, one masked sum out. The caller divides by the global count.

Notation: t = trainer logprob (with gradient), o = trainer logprob under the weights at the start of
the step, g = generator logprob at sampling time, A = advantage. Ratios are computed in fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torchtitan_rl.observability.metrics import Mean, Metrics
from torchtitan_rl.plugins import check_arguments, resolve


@dataclass(slots=True)
class LossInputs:
    """The tokens of one microbatch that train, flattened: every tensor is [tokens], fp32."""

    logprobs: torch.Tensor
    """t, with gradient"""
    old_logprobs: torch.Tensor
    """o, constant"""
    advantages: torch.Tensor
    """A, constant"""
    generator_logprobs: torch.Tensor | None = None
    """g, constant; None when nobody sampled these tokens (demonstrations)"""


@dataclass(slots=True)
class LossOutput:
    loss_sum: torch.Tensor
    """Sum over tokens, a scalar with gradient."""
    metrics: Metrics = field(default_factory=dict)


LossFn = Callable[..., LossOutput]


def clipped(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2) -> LossOutput:
    """-min(ρA, clip(ρ, 1-ε_low, 1+ε_high)·A) with ρ = exp(t - o): GRPO's loss, and DAPO's when
    clip_high > clip_low.

    Example:
        ρ = 1.5, A = 1: the loss is -1.2 and its gradient is 0; ρ = 1.5, A = -1: 1.5, not clipped.
    """
    ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    unclipped_term = ratio * inputs.advantages
    clipped_term = clipped_ratio * inputs.advantages
    tokens = float(ratio.numel())
    return LossOutput(
        loss_sum=-torch.minimum(unclipped_term, clipped_term).sum(),
        metrics={
            "loss/clipped_share": Mean((clipped_term < unclipped_term).sum().item(), tokens),
        },
    )


LOSSES: dict[str, LossFn] = {"grpo": clipped}


@dataclass(kw_only=True, slots=True)
class LossConfig:
    """Which policy loss, by name or import path."""

    name: str = "grpo"
    """grpo, or `package.module:function` of your own."""
    kwargs: dict[str, float | str] = field(default_factory=dict)
    """Keyword arguments of the function, such as clip_low and clip_high."""

    def __post_init__(self) -> None:
        function = resolve(self.name, LOSSES, what="loss")
        check_arguments(self.name, function, self.kwargs, what="loss")
        for bound in ("clip_low", "clip_high"):
            value = self.kwargs.get(bound, 0.0)
            if not isinstance(value, int | float) or value < 0:
                raise ValueError(f"loss.kwargs.{bound} must be a number from 0 up; got {value!r}")


CHUNK_TOKENS = 2048


def token_logprobs(
    logits: torch.Tensor,  # [tokens, vocab]
    targets: torch.Tensor,  # [tokens]
    temperatures: torch.Tensor,  # [tokens]
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target) [tokens] and entropy [tokens] of the distribution that was sampled from.

    Logits are divided by the temperature of each token, as the generator did.
    """
    chosen, entropies = [], []
    # In pieces: [tokens, vocab] in fp32 would be the largest tensor of the step, several times.
    for start in range(0, max(len(targets), 1), CHUNK_TOKENS):
        piece = slice(start, start + CHUNK_TOKENS)
        logprobs = torch.log_softmax(
            logits[piece].float() / temperatures[piece].unsqueeze(-1), dim=-1
        )
        chosen.append(logprobs.gather(-1, targets[piece].unsqueeze(-1)).squeeze(-1))
        with torch.no_grad():
            entropies.append(-(logprobs.exp() * logprobs).sum(-1))
    return torch.cat(chosen), torch.cat(entropies)
