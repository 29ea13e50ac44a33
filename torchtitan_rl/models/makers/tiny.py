"""Tiny Qwen3 for a laptop: 0.6M parameters and a byte-level tokenizer, made from a seed.

The tokenizer knows the 256 bytes, Qwen3's chat tokens and the pieces of a tool call, so prompts go
through the same renderer as those of a real Qwen3.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from torchtitan_rl.models.hf import atomic_folder

CHAT_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)

CALL_PIECES = (
    *('{"name": "', '", "arguments": {"', '": "', '"}}'),
    *("calculator", "expression", "spell"),
)
"""Tokens for parts of tool calls: in bytes a call would be three times as long."""

CHAT_TEMPLATE = (
    "{% set thought = '' if enable_thinking | default(true) else '<think>\n\n</think>\n\n' %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ thought if message.role == 'assistant' }}{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ thought }}{% endif %}"
)
"""Chat template that renders like this library, for transformers and vLLM."""

TINY_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "dtype": "float32",
}

TINY_QWEN3_MOE = {
    **TINY_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
}
"""Mixture of experts whose first layer is dense, as in many large models."""


def tiny_config(experts: int = 0) -> dict[str, Any]:
    """Contents of config.json without the vocabulary: a dense Qwen3, or with `experts` an MoE.

    Example:
        >>> tiny_config(experts=8)["architectures"]
        ['Qwen3MoeForCausalLM']
    """
    return {**TINY_QWEN3_MOE, "num_experts": experts} if experts else TINY_QWEN3


def byte_tokenizer() -> Tokenizer:
    """Tokenizer with one token per byte, then chat tokens, then parts of tool calls; ids are
    stable.

    Example:
        >>> len(byte_tokenizer().encode("47").ids)
        2
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in CHAT_TOKENS]
    )
    tokenizer.add_tokens([AddedToken(p, special=False, normalized=False) for p in CALL_PIECES])
    return tokenizer


def write_tiny_model(
    folder: str | Path, *, seed: int, weights: bool = True, experts: int = 0, **shape: int
) -> Path:
    """Write a randomly initialised tiny Qwen3 as an HF folder; a seed always gives the same bytes.

    With `experts` the model is a Qwen3-MoE with that many experts in every layer but the first;
    `shape` overrides sizes in config.json.
    """
    tokenizer = byte_tokenizer()
    special = {token: tokenizer.token_to_id(token) for token in CHAT_TOKENS}
    end_ids = [special["<|im_end|>"], special["<|endoftext|>"]]
    # A multiple of 16 keeps the GEMM of the output layer aligned.
    vocab_size = -(-tokenizer.get_vocab_size() // 16) * 16
    config = {
        **tiny_config(experts),
        **shape,
        "vocab_size": vocab_size,
        "bos_token_id": special["<|endoftext|>"],
        "eos_token_id": end_ids[0],
    }
    with atomic_folder(folder) as temporary:
        (temporary / "config.json").write_text(json.dumps(config, indent=2))
        (temporary / "generation_config.json").write_text(json.dumps({"eos_token_id": end_ids}))
        tokenizer.save(str(temporary / "tokenizer.json"))
        (temporary / "tokenizer_config.json").write_text(
            json.dumps(
                {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "eos_token": "<|im_end|>",
                    "pad_token": "<|endoftext|>",
                    "model_max_length": config["max_position_embeddings"],
                    "chat_template": CHAT_TEMPLATE,
                },
                indent=2,
            )
        )
        if weights:
            save_file(_random_weights(temporary, seed), temporary / "model.safetensors")
    return Path(folder)


def _random_weights(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """Weights for the config.json in `folder`, under their HF names."""
    from torchtitan_rl.models.spec import build_on_meta, model_spec

    spec = model_spec(folder)
    model: Any = build_on_meta(spec).to_empty(device="cpu")
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model.init_weights()
    adapter = spec.state_dict_adapter(spec.model, str(folder))
    return {name: t.detach().contiguous() for name, t in adapter.to_hf(model.state_dict()).items()}
