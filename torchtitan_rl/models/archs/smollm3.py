"""SmolLM3: a Llama of which every fourth layer knows no positions (NoPE)."""

from torchtitan_rl.models.archs.architecture import Architecture, Config, sizes


def _rotates(config: Config, number: int) -> bool:
    """Whether a layer rotates: the list `no_rope_layers`, if there is one, has a 1 for those."""
    if listed := config.get("no_rope_layers"):
        return bool(listed[number])
    return (number + 1) % (config.get("no_rope_layer_interval") or 4) != 0


SMOLLM3 = Architecture(
    "SmolLM3ForCausalLM",
    tied=True,
    rotates=_rotates,
    shapes={
        "SmolLM3-3B": {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            **sizes(2048, 11008, 36, 16, num_key_value_heads=4),
            "vocab_size": 128256,
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5e6,
            "no_rope_layer_interval": 4,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "use_sliding_window": False,
            "dtype": "bfloat16",
        },
    },
)
