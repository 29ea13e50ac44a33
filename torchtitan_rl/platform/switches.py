"""Optimizations that can be switched off one by one, to measure what each is worth.

`TORCHTITAN_RL_WITHOUT=name,name` in the environment of a run switches those off in all of its
processes; benchmarks/ablation.py does so for each. All others are on. docs/performance.md says what
each does.
"""

import os

from torchtitan_rl.core.plugins import nearest

VARIABLE = "TORCHTITAN_RL_WITHOUT"

NAMES = (
    # engines/vllm/cpu, models/cpu
    *("norms", "direct_load", "packed_attention", "accumulating_linear", "onednn_products"),
    # platform
    "release_freed_memory",
    # the environment of workers: `platform.worker_env`
    *("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX"),
    *("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"),
    "MONARCH_RDMA_TCP_FALLBACK_PARALLELISM",
)
"""All optimizations that can be switched off, by the file they are in."""


def enabled(name: str) -> bool:
    """Whether the optimization of this name is on.

    Example:
        >>> os.environ[VARIABLE] = "norms, direct_load"
        >>> enabled("norms"), enabled("packed_attention")
        (False, True)
    """
    return name not in switched_off()


def switched_off() -> set[str]:
    """Names of the optimizations that are off; a name that is none of them is refused."""
    given = os.environ.get(VARIABLE, "").split(",")
    names = {name.strip() for name in given} - {""}
    for name in sorted(names.difference(NAMES)):
        raise ValueError(f"{VARIABLE}: unknown name {name!r}; {nearest(name, NAMES)}")
    return names
