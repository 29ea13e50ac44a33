"""From an HF folder to a torchtitan ModelSpec: the folder's config.json is the only description.

There is no table of sizes to keep: any folder whose architecture is in `archs/registry.py` trains,
from the 0.6M-parameter starting model to Qwen3-14B and the mixtures of experts.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtitan.models.common import Embedding
from torchtitan.models.common.attention import FusedQKVLinear, GQAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl.models import cpu, cuda
from torchtitan_rl.models.head import LogprobHead
from torchtitan_rl.models.hf import architecture_of, head_size, moe_layers, read_hf_config
from torchtitan_rl.models.moe import HFAdapter, moe_config
from torchtitan_rl.models.parts import Parts
from torchtitan_rl.models.rope import rope_config
from torchtitan_rl.platform import device_type


def model_spec(folder: str | Path) -> ModelSpec:
    """The torchtitan ModelSpec of the model in an HF folder.

    Example:
        >>> spec = model_spec("outputs/models/tiny")  # doctest: +SKIP
        >>> spec.model.dim                            # doctest: +SKIP
        128
    """
    return _decoder(read_hf_config(folder), Path(folder).name)


def build_on_meta(spec: ModelSpec) -> nn.Module:
    """The model without memory behind it, to count parameters and check shapes anywhere."""
    with torch.device("meta"):
        return spec.model.build()


def _decoder(config: dict[str, Any], name: str) -> ModelSpec:
    """torchtitan's Qwen3, with what sets the architecture apart: see `Architecture`."""
    architecture = architecture_of(config)
    dim, vocab_size = config["hidden_size"], config["vocab_size"]
    eps, head_dim = config["rms_norm_eps"], head_size(config)
    linear: dict[str, Callable] = {
        "weight": partial(nn.init.normal_, std=0.02),
        "bias": nn.init.zeros_,
    }
    tied = config["tie_word_embeddings"]
    parts = (cpu if device_type() == "cpu" else cuda).apply(Parts())

    def norm(size: int) -> RMSNorm.Config:
        ones = {"weight": nn.init.ones_}
        return RMSNorm.Config(normalized_shape=size, eps=eps, param_init=ones)

    def feed_forward() -> FeedForward.Config:
        made = make_ffn_config(
            dim=dim,
            hidden_dim=config["intermediate_size"],
            w1_param_init=linear,
            w2w3_param_init=linear,
        )
        w1, w2, w3 = map(parts.as_linear, (made.w1, made.w2, made.w3))
        return FeedForward.Config(w1=w1, w2=w2, w3=w3)

    def attention(number: int) -> GQAttention.Config:
        made = make_gqa_config(
            dim=dim,
            n_heads=config["num_attention_heads"],
            n_kv_heads=config["num_key_value_heads"],
            head_dim=head_dim,
            wqkv_param_init=linear,
            wo_param_init=linear,
            inner_attention=parts.attention.Config(),
            fuse_qkv=True,
            rope=rope_config(config, rotates=architecture.rotates(config, number)),
            qk_norm=norm(head_dim) if architecture.qk_norm else None,
        )
        qkv = made.qkv_linear
        assert isinstance(qkv, FusedQKVLinear.Config)
        qkv.wqkv = parts.as_linear(replace(qkv.wqkv, bias=architecture.qkv_bias))
        made.wo = parts.as_linear(made.wo)
        return made

    def layer(number: int) -> Qwen3TransformerBlock.Config:
        sparse = number in moe_layers(config)
        return Qwen3TransformerBlock.Config(
            attention_norm=norm(dim),
            ffn_norm=norm(dim),
            attention=attention(number),
            moe=moe_config(config, linear) if sparse else None,
            feed_forward=None if sparse else feed_forward(),
        )

    model = Qwen3Model.Config(
        vocab_size=vocab_size,
        dim=dim,
        norm=norm(dim),
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab_size,
            embedding_dim=dim,
            param_init={"weight": skip_param_init if tied else partial(nn.init.normal_, std=0.02)},
        ),
        lm_head=LogprobHead.Config(in_features=dim, out_features=vocab_size, param_init=linear),
        layers=[layer(number) for number in range(config["num_hidden_layers"])],
    )
    return ModelSpec(
        name="qwen3",
        flavor=name,
        model=model,
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=HFAdapter,
    )
