"""Llama, with the scaled rotations of 3.1 to 3.3 or without, and SmolLM2, which is one."""

from typing import Any

from torchtitan_rl.models.archs.architecture import Architecture, Config, sizes


def _llama3(*shape: int, factor: float = 8.0, **more: Any) -> Config:
    """A Llama 3.1, 3.2 or 3.3: rotations of a context 16 times that of its first training."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes(*shape),
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **more,
    }


def _smollm2(*shape: int, rope_theta: float = 100000.0) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes(*shape),
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


_SMALL = {"factor": 32.0, "tie_word_embeddings": True}

LLAMA = Architecture(
    "LlamaForCausalLM",
    shapes={
        "Llama-3.1-8B-Instruct": _llama3(4096, 14336, 32, 32),
        "Llama-3.1-70B-Instruct": _llama3(8192, 28672, 80, 64),
        "Llama-3.2-1B-Instruct": _llama3(2048, 8192, 16, 32, head_dim=64, **_SMALL),
        "Llama-3.2-3B-Instruct": _llama3(3072, 8192, 28, 24, head_dim=128, **_SMALL),
        "Llama-3.3-70B-Instruct": _llama3(8192, 28672, 80, 64),
        "SmolLM2-135M-Instruct": _smollm2(576, 1536, 30, 9) | {"num_key_value_heads": 3},
        "SmolLM2-360M-Instruct": _smollm2(960, 2560, 32, 15) | {"num_key_value_heads": 5},
        "SmolLM2-1.7B-Instruct": _smollm2(2048, 8192, 24, 32, rope_theta=130000.0)
        | {"num_key_value_heads": 32},
    },
)
