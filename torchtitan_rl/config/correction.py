"""Off-policy correction: what to do with tokens on which trainer and generator disagree."""

from dataclasses import dataclass
from typing import Literal

from torchtitan_rl.core.plugins import nearest

Bounds = tuple[float, float]

DEFAULT_BOUNDS: dict[tuple[str, str], Bounds] = {
    ("sequence_outliers", "on"): (1e-4, 100.0),
    ("token_mask", "on"): (0.5, 5.0),
    ("sequence_mask", "geometric"): (0.99, 1.01),
    ("sequence_mask", "product"): (0.5, 2.0),
}
"""Bounds by mask and its mode."""
DEFAULT_CAPS = {"token": 2.0, "sequence": 5.0}
"""Largest importance weight by mode."""


@dataclass(kw_only=True, slots=True)
class CorrectionConfig:
    """Corrections, in the order in which they are applied; all are off by default. The ends of
    bounds are inside."""

    sequence_outliers: Literal["off", "on"] = "off"
    """Drops a sequence if w of any of its tokens lies outside the bounds. w is the trainer's
    probability of a token, at the start of the step, divided by the generator's."""
    sequence_outliers_bounds: Bounds | None = None
    """Bounds of sequence_outliers; None: 1e-4 and 100."""
    token_mask: Literal["off", "on"] = "off"
    """Drops tokens whose w lies outside the bounds (IcePop)."""
    token_mask_bounds: Bounds | None = None
    """Bounds of token_mask; None: 0.5 and 5."""
    importance_weight: Literal["off", "token", "sequence"] = "off"
    """Multiplies the loss by w of the token, or by the product of w over its sequence."""
    importance_cap: float | None = None
    """Largest importance weight; None: 2 per token and 5 per sequence."""
    sequence_mask: Literal["off", "geometric", "product"] = "off"
    """Drops a sequence if the geometric mean, or the product, of w over its tokens lies outside
    the bounds."""
    sequence_mask_bounds: Bounds | None = None
    """Bounds of sequence_mask; None: 0.99 and 1.01 for the geometric mean, 0.5 and 2 for the
    product."""

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
        """Whether anything is corrected."""
        modes = (
            self.sequence_outliers,
            self.token_mask,
            self.importance_weight,
            self.sequence_mask,
        )
        return any(mode != "off" for mode in modes)

    @property
    def cap(self) -> float:
        """Largest importance weight in the mode that is on."""
        return self.importance_cap or DEFAULT_CAPS[self.importance_weight]

    def bounds(self, mask: str) -> Bounds:
        """Lowest and highest value that a mask which is on lets through."""
        return getattr(self, f"{mask}_bounds") or DEFAULT_BOUNDS[mask, getattr(self, mask)]
