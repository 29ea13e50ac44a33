"""An advantage of your own: the rank within the group, so that the size of rewards does not matter.

torchtitan-rl train --module examples/custom_task.py --config palindromes_tiny \
    --advantage.name custom_advantage:ranks --advantage.kwargs scale 0.5

This module is found because it is beside the file of the recipe; the folder you are in works too.
"""

from collections.abc import Sequence

from torchtitan_rl import ScoredCompletion


def ranks(group: Sequence[ScoredCompletion], *, scale: float = 1.0) -> list[float]:
    """How many of the group a sample beats, minus how many beat it, as a share of the others.

    Example:
        Rewards 5, 1, 1, 0: 1, 0, 0, -1. Equal rewards: all 0, and the group is left out.
    """
    rewards = [scored.reward for scored in group]
    others = max(len(rewards) - 1, 1)
    return [scale * sum((r > o) - (r < o) for o in rewards) / others for r in rewards]
