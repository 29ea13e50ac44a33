"""Mixture of experts of a layer: exact on a CPU, torchtitan's own kernels on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear
from torchtitan.models.common.config_utils import make_token_dispatcher_config
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from torchtitan_rl.models.router_replay import ReplayRouter
from torchtitan_rl.platform import device_type


class ExactExperts(GroupedExperts):
    """Experts computed one by one, in the dtype of their input.

    torchtitan's own module casts everything to bfloat16 for a grouped GEMM that only a GPU has.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Outputs of rows that are sorted by expert: `num_tokens_per_expert_E[0]` rows of expert 0
        come first."""
        rows = x_RD.split(num_tokens_per_expert_E.tolist())
        # `unbind`, not indexing: its backward pass makes one gradient for all experts, not one
        # each.
        weights = zip(*(_local(w).unbind() for w in self._weights()), strict=True)
        return torch.cat(
            [
                F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)
                for x, (w1, w2, w3) in zip(rows, weights, strict=True)
            ]
        )

    def _weights(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.w1_EFD, self.w2_EDF, self.w3_EFD


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


class Gate(Linear):
    """Gate of a router whose gradient arrives whole under tensor parallelism.

    DTensor would shard the gradient by rows, and then fail to flatten an odd number of them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    # The argument's name must stay: torchtitan shards it by name.
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        logits = super().forward(input)
        if isinstance(logits, DTensor):
            # Does nothing in the forward pass, and gathers the gradient in the backward pass.
            logits = logits.redistribute(placements=logits.placements)
        return logits


class HFAdapter(Qwen3StateDictAdapter):
    """State-dict adapter of all architectures. It knows biases of queries, keys and values, and
    experts replicated over a dimension (HSDP), which torchtitan 0.3's does not."""

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        # torchtitan reads an index there, and warns if the weights are in one file and have none.
        index = Path(hf_assets_path or "") / "model.safetensors.index.json"
        super().__init__(model_config, hf_assets_path if index.is_file() else None)
        self.hf_assets_path = hf_assets_path
        for part in "qkv":
            name = f"model.layers.{{}}.self_attn.{part}_proj.bias"
            self.from_hf_map[name] = f"layers.{{}}.attention.qkv_linear.w{part}.bias"

    def _caculate_indices_from_placements(
        self, dim: int, dim_size: int, dtensor_placements: tuple, device_mesh: DeviceMesh
    ) -> tuple[int, int]:
        names = device_mesh.mesh_dim_names or ()
        sharded = {
            name: placement
            for name, placement in zip(names, dtensor_placements, strict=True)
            if not placement.is_replicate()
        }
        if not sharded:
            return 0, dim_size
        return super()._caculate_indices_from_placements(
            dim, dim_size, tuple(sharded.values()), device_mesh[tuple(sharded)]
        )


def moe_config(hf: dict[str, Any], linear: dict[str, Callable]) -> MoE.Config:
    """Config of one layer's experts, from config.json; `linear` initialises their weights.

    torchtitan's load-balancing bias stays off: it would change the policy without the loss, and the
    generator does not have it.
    """
    dim, experts, top_k = hf["hidden_size"], hf["num_experts"], hf["num_experts_per_tok"]
    make_experts = ExactExperts.Config if device_type() == "cpu" else GroupedExperts.Config
    return MoE.Config(
        num_experts=experts,
        load_balance_coeff=None,
        router=ReplayRouter.Config(
            num_experts=experts,
            gate=Gate.Config(in_features=dim, out_features=experts, bias=False, param_init=linear),
            top_k=top_k,
            score_func="softmax",
            route_norm=hf["norm_topk_prob"],
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=make_experts(
                dim=dim,
                hidden_dim=hf["moe_intermediate_size"],
                num_experts=experts,
                param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), linear["weight"]),
            ),
            token_dispatcher=make_token_dispatcher_config(
                num_experts=experts, top_k=top_k, comm_backend="standard"
            ),
        ),
    )
