"""Mistral without a sliding window: 7B from v0.2, Nemo, and Small up to 2501."""

from torchtitan_rl.models.archs.architecture import DENSE_FIELDS, PLAIN, Architecture, Config, sizes

_FAMILY: Config = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}

MISTRAL = Architecture(
    "MistralForCausalLM",
    # transformers takes a window of 4096 for granted where none is named.
    needed=(*DENSE_FIELDS, "sliding_window"),
    only={**PLAIN, "sliding_window": None},
    shapes={
        "Mistral-7B-Instruct-v0.3": _FAMILY
        | sizes(4096, 14336, 32, 32, vocab_size=32768, max_position_embeddings=32768),
    },
)
