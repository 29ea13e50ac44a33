"""A tiny model of every architecture, with random weights, written by transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from torchtitan_rl.models.archs.architecture import sizes

SHAPE = {
    **sizes(128, 160, 2, 4, num_key_value_heads=2, vocab_size=272),
    "max_position_embeddings": 131072,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 271,
    "dtype": "float32",
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
"""Scaled rotations whose first context is so short that any prompt is longer."""
TINY: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 64},
    "llama3": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_parameters": SCALED,
        "tie_word_embeddings": True,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "no_rope_layer_interval": 2,
        "tie_word_embeddings": True,
    },
}
"""What sets each apart, by a name of ours."""


def write_tiny(name: str, folder: Path, *, tokenizer: Path | None = None, **changes: Any) -> Path:
    """Write the tiny model of a name in TINY, with noise on all weights: none are alike. `changes`
    are to its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE | TINY[name] | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    for weight in model.parameters():
        weight.data += torch.randn_like(weight) * (0.3 if weight.dim() == 1 else 0.06)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json") if tokenizer else ():
        shutil.copy(tokenizer / file, folder)
    return folder
