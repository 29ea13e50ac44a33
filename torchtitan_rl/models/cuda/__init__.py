"""Kernels for training on a GPU: which are there, and how they are called."""

from dataclasses import replace

from torchtitan_rl.models.parts import Parts


def apply(parts: Parts) -> Parts:
    """A model's parts for a GPU: torchtitan's, with the attention of this package."""
    from torchtitan_rl.models.cuda.attention import PackedFlashAttention

    return replace(parts, attention=PackedFlashAttention)
