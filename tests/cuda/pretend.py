"""A GPU that is not there: what torch says of one, and the models that the recipes train."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan_rl.models.makers.tiny import write_tiny_model
from torchtitan_rl.platform import device_type
from torchtitan_rl.platform.flash_attention import activate_kernel

CAPABILITIES = [(8, 0), (9, 0), (10, 0), (12, 0)]
"""Compute capabilities of an A100, an H100, a B200 and an RTX 5090."""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M-Instruct": LLAMA
    | {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "Qwen3-0.6B": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-1.7B": QWEN3
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-14B": QWEN3
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "tie_word_embeddings": False,
    },
}
"""What config.json says of the models of the built-in recipes, by the name of their folder."""


@contextmanager
def pretend_gpus(capability: tuple[int, int], *, count: int = 8) -> Iterator[None]:
    """Inside the block torch says that the machine has GPUs, and we take it for one with CUDA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCHTITAN_RL_PLATFORM", raising=False)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: count)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        forget()
        try:
            yield
        finally:
            forget()


def forget() -> None:
    """Have everything that was cached about this machine's devices be asked again."""
    device_type.cache_clear()
    activate_kernel.cache_clear()


def model_folder(config: Any, folder: Path) -> Path:
    """The folder of a recipe's model, without weights: what a warm start makes, or its shape."""
    if not config.model:
        experts = config.warm_start.experts
        return write_tiny_model(folder / f"tiny-{experts}", seed=0, weights=False, experts=experts)
    return shape_folder(Path(config.model).name, folder)


def shape_folder(name: str, folder: Path) -> Path:
    """A folder with the config.json of a model, and nothing else."""
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPES[name]))
    return path
