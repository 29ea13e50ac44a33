"""What sets an architecture apart from the others, as data: nothing here imports torch.

All of them are decoders with grouped-query attention, RMSNorm before attention and MLP, and a gated
MLP or experts; `torchtitan_rl/models/spec.py` builds them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]
"""Contents of a config.json."""

DENSE_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings"),
)
"""Fields that every config.json must have."""

PLAIN: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
}
"""Optional fields, and the only value of each that most architectures support."""


def every_layer(config: Config, number: int) -> bool:
    """True: what is asked is so in every layer."""
    return True


@dataclass(frozen=True, slots=True)
class Architecture:
    """A supported architecture."""

    name: str
    """Name in the list `architectures` of a config.json."""
    needed: tuple[str, ...] = DENSE_FIELDS
    """Fields that its config.json must have."""
    only: Mapping[str, Any] = field(default_factory=lambda: PLAIN)
    """Optional fields, and the only value of each that is supported."""
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias."""
    qk_norm: bool = False
    """Whether queries and keys are normalised, head by head."""
    tied: bool = False
    """Whether the output layer is the embedding where config.json does not say."""
    rotates: Callable[[Config, int], bool] = every_layer
    """Whether the layer of a number rotates queries and keys by their positions."""
    shapes: Mapping[str, Config] = field(default_factory=dict)
    """Contents of config.json by the name of a well-known model's folder."""


def sizes(hidden: int, intermediate: int, layers: int, heads: int, **more: Any) -> Config:
    """The part of a config.json in which models of one family differ.

    Example:
        >>> sizes(64, 128, 2, 4, head_dim=16)["num_hidden_layers"]
        2
    """
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **more,
    }
