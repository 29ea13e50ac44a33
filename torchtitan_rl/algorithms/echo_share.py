"""Echo's weight by its share of the gradient, so that RL stays in charge whatever `alpha` is.

The share that an `alpha` gives depends on the task, the model and the step, and only a backward
pass shows it. All alphas are therefore multiplied by one factor, at most 1, which follows the
measured shares. The first update is measured before it is made. Each later update has the factor
that the updates before it have led to.
"""

import math

MOST_CHANGE = 4.0
"""Largest change of the factor in one update, as a ratio: one batch may be an exception."""
LEAST_FACTOR = 1e-6
"""Smallest factor: from 0 it could not grow again."""


def first_factor(share: float, *, most: float) -> float:
    """The factor that gives Echo the share `most`, if without one it would have `share`.

    Example:
        >>> first_factor(0.9, most=0.5)
        0.1111111111111111
    """
    return _right_factor(1.0, share, most)


def next_factor(factor: float, share: float, *, most: float) -> float:
    """The factor of the next update, after one in which `factor` gave Echo `share`: the geometric
    mean of that factor and of the one that would have given it `most`.

    Example:
        >>> next_factor(0.1, 0.8, most=0.5)
        0.05
    """
    wanted = math.sqrt(factor * _right_factor(factor, share, most))
    return min(max(wanted, factor / MOST_CHANGE, LEAST_FACTOR), factor * MOST_CHANGE, 1.0)


def _right_factor(factor: float, share: float, most: float) -> float:
    """Norms of gradients are proportional to the factor; shares are those of norms in their sum."""
    if share <= most * 1e-6:  # as good as no gradient of Echo: nothing to hold down
        return 1.0
    ratio = most * (1.0 - share) / (share * (1.0 - most))
    return min(max(factor * ratio, LEAST_FACTOR), 1.0)
