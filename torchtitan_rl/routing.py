"""Which experts a router chose, as a compact array [tokens, layers with experts, top_k]."""

import numpy as np


def expert_dtype(experts: int) -> np.dtype:
    """The smallest dtype that numbers the experts and that torch takes.

    Example:
        >>> expert_dtype(256), expert_dtype(257)
        (dtype('uint8'), dtype('int16'))
    """
    return np.dtype(np.uint8 if experts <= 256 else np.int16)


def filler(tokens: int, layers: int, top_k: int, dtype: np.dtype) -> np.ndarray:
    """Rows for tokens nobody routed: padding, and the last sampled token.

    Each row names different experts: one named twice would be counted once and computed twice.

    Example:
        >>> filler(1, 2, 2, np.dtype(np.uint8)).tolist()
        [[[0, 1], [0, 1]]]
    """
    return np.tile(np.arange(top_k, dtype=dtype), (tokens, layers, 1))
