"""What config.json says of well-known models, so that a run can be planned before a download."""

from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_QWEN3_MOE = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **more,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _QWEN3 | _sizes(1024, 3072, 28, 16, tie_word_embeddings=True),
    "Qwen3-1.7B": _QWEN3 | _sizes(2048, 6144, 28, 16, tie_word_embeddings=True),
    "Qwen3-4B": _QWEN3 | _sizes(2560, 9728, 36, 32, tie_word_embeddings=True),
    "Qwen3-8B": _QWEN3 | _sizes(4096, 12288, 36, 32),
    "Qwen3-14B": _QWEN3 | _sizes(5120, 17408, 40, 40),
    "Qwen3-32B": _QWEN3 | _sizes(5120, 25600, 64, 64),
    "Qwen3-30B-A3B": _QWEN3_MOE | _sizes(2048, 6144, 48, 32, moe_intermediate_size=768),
    "Qwen3-235B-A22B": _QWEN3_MOE | _sizes(4096, 12288, 94, 64, moe_intermediate_size=1536),
    "SmolLM2-135M-Instruct": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_sizes(576, 1536, 30, 9),
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
}
"""Contents of config.json by the name of the model's folder."""
