"""Per-token estimates of a KL divergence, used as a loss: a soft trust region."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchtitan_rl.core.plugins import nearest

Estimator = Callable[[torch.Tensor], torch.Tensor]


def k1(d: torch.Tensor) -> torch.Tensor:
    """d. Unbiased as an estimate; as a loss its on-policy gradient has zero expectation."""
    return d


def absolute(d: torch.Tensor) -> torch.Tensor:
    """|d|"""
    return d.abs()


def k2(d: torch.Tensor) -> torch.Tensor:
    """½d²: its gradient is that of the KL, on-policy."""
    return 0.5 * d.square()


def k3(d: torch.Tensor) -> torch.Tensor:
    """eˣ - x - 1 with x = -d: never negative; clamped against ratios that ran away."""
    x = (-d).clamp(-20.0, 20.0)
    return (x.expm1() - x).clamp(-10.0, 10.0)


ESTIMATORS: dict[str, Estimator] = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}
"""Of d = t - other, the difference of two logprobs of the same token."""


@dataclass(kw_only=True, slots=True)
class KLConfig:
    """A KL term of the loss."""

    coef: float = 0.0
    """Its weight; 0 switches it off."""
    estimator: str = "k2"
    """k1, abs, k2 or k3"""

    def __post_init__(self) -> None:
        if not 0 <= self.coef < float("inf"):
            raise ValueError(
                f"the coef of a KL term must be 0 (off) or a positive number; got {self.coef}"
            )
        if self.estimator not in ESTIMATORS:
            raise ValueError(
                f"unknown KL estimator {self.estimator!r}; {nearest(self.estimator, ESTIMATORS)}"
            )

    @property
    def on(self) -> bool:
        return self.coef > 0

    def notices(self, name: str) -> list[str]:
        """What the user should know about this choice."""
        if self.on and self.estimator == "k1":
            return [
                f"{name}.estimator is k1: as a loss its on-policy gradient has zero expectation, "
                "so it only adds noise; k2 is the usual choice"
            ]
        return []
