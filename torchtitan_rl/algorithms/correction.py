"""Off-policy correction: what to do with tokens on which trainer and generator disagree.

The two compute the same policy with different kernels, and asynchronous runs sample with older
weights. w = exp(o - g) says by how much, per token. Masks change what trains, never what the loss
is divided by.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch

from torchtitan_rl.algorithms.policy_loss import sequence_means, sequence_sums
from torchtitan_rl.core.metrics import Distribution, Mean, Metrics
from torchtitan_rl.core.plugins import nearest

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

    def outside(self, mask: str, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which values are too high and which too low for a mask that is on."""
        default = DEFAULT_BOUNDS[mask, getattr(self, mask)]
        low, high = getattr(self, f"{mask}_bounds") or default
        return w > high, w < low


@dataclass(slots=True)
class Corrected:
    """What a correction makes of a microbatch; all tensors are [tokens]."""

    weights: torch.Tensor
    """What to multiply each token's loss by; 0 where a mask drops it."""
    high: torch.Tensor
    """Dropped, or capped, because a ratio is too high."""
    low: torch.Tensor
    """Dropped because it is too low."""
    metrics: Metrics = field(default_factory=dict)

    def drop(self, name: str, high: torch.Tensor, low: torch.Tensor) -> None:
        """Leave out what a mask finds too high or too low."""
        outside = high | low
        dropped = ((self.weights > 0) & outside).sum().item()
        self.metrics[f"correction/{name}_share"] = Mean(dropped, float(outside.numel()))
        self.weights = self.weights * ~outside
        self.high, self.low = self.high | high, self.low | low


def correction_weights(
    config: CorrectionConfig,
    old_logprobs: torch.Tensor,
    generator_logprobs: torch.Tensor,
    sequence_ids: torch.Tensor,
) -> Corrected:
    """What to multiply each token's loss by, and what was done; all tensors are [tokens], and no
    gradient passes.

    Masks look at all tokens of a sequence, also at those that an earlier one has dropped; a share
    in the metrics counts what a mask drops of what those before it have left.
    """
    log_w = (old_logprobs - generator_logprobs).detach().float().clamp(-20.0, 20.0)
    w = log_w.exp()
    none = torch.zeros_like(w, dtype=torch.bool)
    done = Corrected(torch.ones_like(w), high=none, low=none)
    if config.sequence_outliers != "off":
        high, low = (
            sequence_sums(outliers.float(), sequence_ids) > 0
            for outliers in config.outside("sequence_outliers", w)
        )
        done.drop("sequence_outliers", high, low)
    if config.token_mask != "off":
        done.drop("token_mask", *config.outside("token_mask", w))
    if config.importance_weight != "off":
        by_token = config.importance_weight == "token"
        importance = w if by_token else sequence_sums(log_w, sequence_ids).exp()
        done.high = done.high | (importance > config.cap)
        importance = importance.clamp(max=config.cap)
        done.metrics["correction/importance_weight"] = Distribution.of(importance)
        done.weights = done.weights * importance
    if config.sequence_mask != "off":
        over = sequence_means if config.sequence_mask == "geometric" else sequence_sums
        value = over(log_w, sequence_ids).exp()
        done.drop("sequence_mask", *config.outside("sequence_mask", value))
    return done
