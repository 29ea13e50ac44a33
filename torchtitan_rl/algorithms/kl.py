"""Per-token estimates of a KL divergence, used as a loss: a soft trust region."""

from collections.abc import Callable

import torch

Estimator = Callable[[torch.Tensor], torch.Tensor]


def k1(d: torch.Tensor) -> torch.Tensor:
    """Estimate d: unbiased, but as a loss its on-policy gradient has zero expectation."""
    return d


def absolute(d: torch.Tensor) -> torch.Tensor:
    """Estimate |d|."""
    return d.abs()


def k2(d: torch.Tensor) -> torch.Tensor:
    """Estimate ½d²: on-policy its gradient is that of the KL divergence."""
    return 0.5 * d.square()


def k3(d: torch.Tensor) -> torch.Tensor:
    """Estimate eˣ - x - 1 with x = -d: never negative; clamped against extreme ratios."""
    x = (-d).clamp(-20.0, 20.0)
    return (x.expm1() - x).clamp(-10.0, 10.0)


ESTIMATORS: dict[str, Estimator] = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}
"""Estimators by name; d = t - other is the difference of two logprobs of the same token."""
