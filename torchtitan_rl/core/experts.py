"""Which experts a router chose, as a compact array [tokens, layers with experts, top_k]."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Experts:
    """What routing of a model looks like."""

    layers: int
    """Layers with experts."""
    top_k: int
    """Experts a token goes to in each."""
    count: int
    """Experts to choose from."""

    def problem(self, routing: np.ndarray) -> str | None:
        """What is wrong with an episode's routing, if anything."""
        if routing.ndim != 3 or routing.shape[1:] != (self.layers, self.top_k):
            return (
                f"routed_experts has the shape {routing.shape}; the model needs [tokens, "
                f"{self.layers} layers with experts, top {self.top_k}]"
            )
        if routing.dtype != expert_dtype(self.count):
            return f"routed_experts is {routing.dtype}; expected {expert_dtype(self.count)}"
        ordered = np.sort(routing, axis=-1)
        if len(ordered) and (ordered.min() < 0 or ordered.max() >= self.count):
            return f"routed_experts names experts outside 0..{self.count - 1}"
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            return "routed_experts names an expert twice for one token"
        return None


def expert_dtype(experts: int) -> np.dtype:
    """The smallest dtype that numbers the experts and that torch takes.

    Example:
        >>> expert_dtype(256), expert_dtype(257)
        (dtype('uint8'), dtype('int16'))
    """
    return np.dtype(np.uint8 if experts <= 256 else np.int16)


def filler(tokens: int, layers: int, top_k: int, dtype: np.dtype) -> np.ndarray:
    """Rows for tokens nobody routed, such as the last one sampled.

    Each row names different experts: one named twice would be counted once and computed twice.

    Example:
        >>> filler(1, 2, 2, np.dtype(np.uint8)).tolist()
        [[[0, 1], [0, 1]]]
    """
    return np.tile(np.arange(top_k, dtype=dtype), (tokens, layers, 1))
