"""Kernels and autograd functions for training on a CPU: one file each, chosen by `apply`.

Each file's header says what its part gains: the time of a whole step without it / with it - 1.
`TORCHTITAN_RL_WITHOUT` switches single ones off.
"""

from dataclasses import replace

from torchtitan_rl.models.parts import Parts
from torchtitan_rl.platform.switches import enabled


def apply(parts: Parts) -> Parts:
    """A model's parts for a CPU: torchtitan's, with those of this package in their place."""
    from torchtitan_rl.models.cpu.attention import PackedAttention
    from torchtitan_rl.models.cpu.linear import AccumulatingLinear

    # torchtitan's own packed attention needs a GPU.
    parts = replace(parts, attention=PackedAttention)
    if enabled("accumulating_linear"):
        parts = replace(parts, linear=AccumulatingLinear)
    return parts
