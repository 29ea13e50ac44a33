"""Optimizations that can be switched off one by one, to measure what each is worth.

`TORCHTITAN_RL_WITHOUT=name,name` in the environment of a run switches those off in all of its
processes; benchmarks/ablation.py does so for each. All others are on.
"""

import os

VARIABLE = "TORCHTITAN_RL_WITHOUT"


def enabled(name: str) -> bool:
    """Whether the optimization of this name is on.

    Example:
        >>> os.environ[VARIABLE] = "sampler,garbage"
        >>> enabled("sampler"), enabled("prompt_sharing")
        (False, True)
    """
    return name not in os.environ.get(VARIABLE, "").split(",")
