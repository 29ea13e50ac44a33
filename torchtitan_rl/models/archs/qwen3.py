"""Qwen3: queries and keys are normalised, and the size of a head is stated."""

from torchtitan_rl.models.archs.architecture import DENSE_FIELDS, Architecture, Config, sizes

FAMILY: Config = {
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

QWEN3 = Architecture(
    "Qwen3ForCausalLM",
    needed=(*DENSE_FIELDS, "head_dim"),
    qk_norm=True,
    shapes={
        "Qwen3-0.6B": FAMILY | sizes(1024, 3072, 28, 16, tie_word_embeddings=True),
        "Qwen3-1.7B": FAMILY | sizes(2048, 6144, 28, 16, tie_word_embeddings=True),
        "Qwen3-4B": FAMILY | sizes(2560, 9728, 36, 32, tie_word_embeddings=True),
        "Qwen3-8B": FAMILY | sizes(4096, 12288, 36, 32),
        "Qwen3-14B": FAMILY | sizes(5120, 17408, 40, 40),
        "Qwen3-32B": FAMILY | sizes(5120, 25600, 64, 64),
    },
)
