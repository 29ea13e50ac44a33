"""Qwen3-MoE: a Qwen3 with experts in place of the MLP, in all layers or in some."""

from torchtitan_rl.models.archs.architecture import Architecture, sizes
from torchtitan_rl.models.archs.qwen3 import FAMILY, QWEN3

_FAMILY = FAMILY | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

QWEN3_MOE = Architecture(
    "Qwen3MoeForCausalLM",
    needed=(
        *QWEN3.needed,
        *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    ),
    qk_norm=True,
    shapes={
        "Qwen3-30B-A3B": _FAMILY | sizes(2048, 6144, 48, 32, moe_intermediate_size=768),
        "Qwen3-235B-A22B": _FAMILY | sizes(4096, 12288, 94, 64, moe_intermediate_size=1536),
    },
)
