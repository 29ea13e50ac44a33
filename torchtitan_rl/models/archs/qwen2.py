"""Qwen2 and Qwen2.5, and models distilled into them: queries, keys and values have a bias."""

from torchtitan_rl.models.archs.architecture import PLAIN, Architecture, Config, sizes

_FAMILY: Config = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
_LARGE = _FAMILY | {"vocab_size": 152064, "tie_word_embeddings": False}

QWEN2 = Architecture(
    "Qwen2ForCausalLM",
    only={**PLAIN, "attention_bias": True},
    qkv_bias=True,
    shapes={
        "Qwen2.5-0.5B-Instruct": _FAMILY | sizes(896, 4864, 24, 14, num_key_value_heads=2),
        "Qwen2.5-1.5B-Instruct": _FAMILY | sizes(1536, 8960, 28, 12, num_key_value_heads=2),
        "Qwen2.5-3B-Instruct": _FAMILY | sizes(2048, 11008, 36, 16, num_key_value_heads=2),
        "Qwen2.5-7B-Instruct": _LARGE | sizes(3584, 18944, 28, 28, num_key_value_heads=4),
        "Qwen2.5-14B-Instruct": _LARGE | sizes(5120, 13824, 48, 40, num_key_value_heads=8),
        "Qwen2.5-32B-Instruct": _LARGE | sizes(5120, 27648, 64, 40, num_key_value_heads=8),
        "Qwen2.5-72B-Instruct": _LARGE | sizes(8192, 29568, 80, 64, num_key_value_heads=8),
    },
)
