"""Intervals of shares, such as accuracies: how far chance alone may have moved them."""

import math

Interval = tuple[float, float]
"""Lower and upper bound."""
Z = 1.959964
"""Standard deviations on either side of the mean that hold 95 % of a normal distribution."""


def share_interval(share: float, count: float) -> Interval:
    """Wilson's 95 % interval of a share of `count` trials.

    Unlike the share plus or minus two standard errors, it is right for few trials, and at 0 and 1.

    Example:
        >>> [round(bound, 3) for bound in share_interval(0.0, 10)]
        [0.0, 0.278]
    """
    if not count:
        return 0.0, 1.0
    middle = share + Z * Z / (2 * count)
    spread = Z * math.sqrt(share * (1 - share) / count + (Z / (2 * count)) ** 2)
    scale = 1 + Z * Z / count
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def change_interval(before: float, after: float, counts: tuple[float, float]) -> Interval:
    """Newcombe's 95 % interval of `after - before`, shares of so many trials each.

    It takes the trials for independent. For the same prompts before and after it is too wide rather
    than too narrow.

    Example:
        >>> [round(bound, 3) for bound in change_interval(48 / 80, 56 / 70, (80, 70))]
        [0.052, 0.334]
    """
    low, high = share_interval(before, counts[0])
    lower, upper = share_interval(after, counts[1])
    change = after - before
    return (
        change - math.hypot(after - lower, high - before),
        change + math.hypot(upper - after, before - low),
    )
