"""Off-policy correction: what to do with tokens on which trainer and generator disagree.

The two compute the same policy with different kernels, and asynchronous runs sample with older
weights. w = exp(o - g) says by how much, per token. Masks change what trains, never what the loss
is divided by.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from torchtitan_rl.algorithms.policy_loss import sequence_means, sequence_sums
from torchtitan_rl.observability.metrics import Distribution, Mean, Metrics
from torchtitan_rl.plugins import nearest

Bounds = tuple[float, float]

DEFAULT_BOUNDS: dict[tuple[str, str], Bounds] = {
    ("sequence_outliers", "on"): (1e-4, 100.0),
    ("token_mask", "on"): (0.5, 5.0),
    ("sequence_mask", "geometric"): (0.99, 1.01),
    ("sequence_mask", "product"): (0.5, 2.0),
}
"""By mask and its mode."""
DEFAULT_CAPS = {"token": 2.0, "sequence": 5.0}


@dataclass(kw_only=True, slots=True)
class CorrectionConfig:
    """Applied in this order; everything is off by default. Bounds are ends included."""

    sequence_outliers: Literal["off", "on"] = "off"
    """Drops a sequence if the w of any of its tokens lies outside the bounds."""
    sequence_outliers_bounds: Bounds | None = None
    """By default 1e-4 and 100."""
    token_mask: Literal["off", "on"] = "off"
    """Drops tokens whose w lies outside the bounds (IcePop)."""
    token_mask_bounds: Bounds | None = None
    """By default 0.5 and 5."""
    importance_weight: Literal["off", "token", "sequence"] = "off"
    """Multiplies the loss by w of the token, or by the product of w over its sequence."""
    importance_cap: float | None = None
    """Largest importance weight; by default 2 per token and 5 per sequence."""
    sequence_mask: Literal["off", "geometric", "product"] = "off"
    """Drops a sequence if the geometric mean, or the product, of w over its tokens lies outside."""
    sequence_mask_bounds: Bounds | None = None
    """By default 0.99 and 1.01 for the geometric mean, 0.5 and 2 for the product."""

    def __post_init__(self) -> None:
        masks = dict.fromkeys(mask for mask, _ in DEFAULT_BOUNDS)
        for mask in masks:
            self._check_mode(mask, [mode for name, mode in DEFAULT_BOUNDS if name == mask])
            bounds = getattr(self, f"{mask}_bounds")
            if bounds is None:
                continue
            self._check_used(mask, f"{mask}_bounds")
            if len(bounds) != 2 or not 0 <= bounds[0] < bounds[1]:
                raise ValueError(
                    f"correction.{mask}_bounds must be 0 <= low < high; got {tuple(bounds)}"
                )
        self._check_mode("importance_weight", list(DEFAULT_CAPS))
        if (cap := self.importance_cap) is not None:
            self._check_used("importance_weight", "importance_cap")
            if not 0 < cap < float("inf"):
                raise ValueError(
                    f"correction.importance_cap must be positive and finite; got {cap}"
                )

    def _check_mode(self, name: str, modes: list[str]) -> None:
        mode = getattr(self, name)
        if mode not in ("off", *modes):
            raise ValueError(f"unknown correction.{name} {mode!r}; {nearest(mode, modes)}, off")

    def _check_used(self, name: str, setting: str) -> None:
        if getattr(self, name) == "off":
            raise ValueError(
                f"correction.{setting} has no effect while correction.{name} is off: switch that "
                f"on, or leave {setting} out"
            )

    @property
    def on(self) -> bool:
        modes = (
            self.sequence_outliers,
            self.token_mask,
            self.importance_weight,
            self.sequence_mask,
        )
        return any(mode != "off" for mode in modes)

    @property
    def cap(self) -> float:
        return self.importance_cap or DEFAULT_CAPS[self.importance_weight]

    def holds(self, mask: str, w: torch.Tensor) -> torch.Tensor:
        """Which values lie within the bounds of a mask that is on."""
        default = DEFAULT_BOUNDS[mask, getattr(self, mask)]
        low, high = getattr(self, f"{mask}_bounds") or default
        return (w >= low) & (w <= high)


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
    w = log_w.exp()
    weights = torch.ones_like(w)
    metrics: Metrics = {}

    def drop(name: str, kept: torch.Tensor) -> None:
        nonlocal weights
        dropped = ((weights > 0) & ~kept).sum().item()
        metrics[f"correction/{name}_share"] = Mean(dropped, float(w.numel()))
        weights = weights * kept

    if config.sequence_outliers != "off":
        outliers = (~config.holds("sequence_outliers", w)).float()
        drop("sequence_outliers", sequence_sums(outliers, sequence_ids) == 0)
    if config.token_mask != "off":
        drop("token_mask", config.holds("token_mask", w))
    if config.importance_weight != "off":
        by_token = config.importance_weight == "token"
        importance = w if by_token else sequence_sums(log_w, sequence_ids).exp()
        importance = importance.clamp(max=config.cap)
        metrics["correction/importance_weight"] = Distribution.of(importance)
        weights = weights * importance
    if config.sequence_mask != "off":
        over = sequence_means if config.sequence_mask == "geometric" else sequence_sums
        drop("sequence_mask", config.holds("sequence_mask", over(log_w, sequence_ids).exp()))
    return weights, metrics
