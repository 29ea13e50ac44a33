"""Off-policy correction: what to do with tokens on which trainer and generator disagree.

The two compute the same policy with different kernels, and asynchronous runs sample with older
weights. w = exp(o - g) says by how much, per token. Masks change what trains, never what the loss
is divided by.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch

from torchtitan_rl.algorithms.policy_loss import ratio_of, sequence_sums
from torchtitan_rl.observability.metrics import Distribution, Mean, Metrics
from torchtitan_rl.plugins import nearest


@dataclass(kw_only=True, slots=True)
class Bounds:
    """An interval of w, ends included."""

    on: bool = False
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(
                f"bounds of a correction must be 0 <= low < high; got {self.low} and {self.high}"
            )

    def hold(self, w: torch.Tensor) -> torch.Tensor:
        return (w >= self.low) & (w <= self.high)


@dataclass(kw_only=True, slots=True)
class CorrectionConfig:
    """Applied in this order; everything is off by default."""

    sequence_outliers: Bounds = field(default_factory=lambda: Bounds(low=1e-4, high=100.0))
    """Drops a sequence if the w of any of its tokens lies outside."""
    token_mask: Bounds = field(default_factory=lambda: Bounds(low=0.5, high=5.0))
    """Drops tokens whose w lies outside (IcePop)."""
    importance_weight: Literal["off", "token", "sequence"] = "off"
    """Multiplies the loss by w of the token, or by the product of w over its sequence."""
    importance_cap: float | None = None
    """Largest importance weight; by default 2 per token and 5 per sequence."""
    sequence_mask: Literal["off", "geometric", "product"] = "off"
    """Drops a sequence if the geometric mean, or the product, of w over its tokens lies outside
    sequence_mask_low..sequence_mask_high."""
    sequence_mask_low: float | None = None
    """By default 0.99 for the geometric mean, 0.5 for the product."""
    sequence_mask_high: float | None = None
    """By default 1.01 for the geometric mean, 2.0 for the product."""

    def __post_init__(self) -> None:
        cap = self.importance_cap
        if cap is not None and not 0 < cap < float("inf"):
            raise ValueError(f"correction.importance_cap must be positive and finite; got {cap}")
        for name, known in (
            ("importance_weight", ("off", "token", "sequence")),
            ("sequence_mask", ("off", "geometric", "product")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"unknown correction.{name} {getattr(self, name)!r}; "
                    f"{nearest(getattr(self, name), known)}"
                )
        self.sequence_bounds  # noqa: B018 - raises when they are the wrong way round

    @property
    def on(self) -> bool:
        masks = self.sequence_outliers.on or self.token_mask.on or self.sequence_mask != "off"
        return masks or self.importance_weight != "off"

    @property
    def cap(self) -> float:
        return self.importance_cap or {"token": 2.0, "sequence": 5.0}[self.importance_weight]

    @property
    def sequence_bounds(self) -> Bounds:
        low, high = (0.5, 2.0) if self.sequence_mask == "product" else (0.99, 1.01)
        return Bounds(
            low=low if self.sequence_mask_low is None else self.sequence_mask_low,
            high=high if self.sequence_mask_high is None else self.sequence_mask_high,
        )


def correction_weights(
    config: CorrectionConfig,
    old_logprobs: torch.Tensor,
    generator_logprobs: torch.Tensor,
    sequence_ids: torch.Tensor,
) -> tuple[torch.Tensor, Metrics]:
    """What to multiply each token's loss by (0 where a mask drops it), and what was done; all
    tensors are [tokens], and no gradient passes.

    Masks look at all tokens of a sequence, also at those that an earlier one has dropped; a share
    in the metrics counts what a mask drops of what those before it have left.
    """
    log_w = (old_logprobs - generator_logprobs).detach().float().clamp(-20.0, 20.0)
    w = ratio_of(log_w)
    weights = torch.ones_like(w)
    metrics: Metrics = {}

    def drop(name: str, kept: torch.Tensor) -> None:
        nonlocal weights
        dropped = ((weights > 0) & ~kept).sum().item()
        metrics[f"correction/{name}_share"] = Mean(dropped, float(w.numel()))
        weights = weights * kept

    if config.sequence_outliers.on:
        outliers = (~config.sequence_outliers.hold(w)).float()
        drop("sequence_outliers", sequence_sums(outliers, sequence_ids) == 0)
    if config.token_mask.on:
        drop("token_mask", config.token_mask.hold(w))
    if config.importance_weight != "off":
        by_token = config.importance_weight == "token"
        importance = w if by_token else sequence_sums(log_w, sequence_ids).exp()
        importance = importance.clamp(max=config.cap)
        metrics["correction/importance_weight"] = Distribution.of(importance)
        weights = weights * importance
    if config.sequence_mask != "off":
        total = sequence_sums(log_w, sequence_ids)
        if config.sequence_mask == "geometric":
            total = total / sequence_sums(torch.ones_like(log_w), sequence_ids)
        drop("sequence_mask", config.sequence_bounds.hold(total.exp()))
    return weights, metrics
