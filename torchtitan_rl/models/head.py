"""Output layer of a model in training: logprobs of chosen tokens in place of logits."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.models.common import Linear

from torchtitan_rl.models.logprobs import WHOLE_VOCABULARY, VocabShard, chosen_logprobs


@dataclass(slots=True)
class Chosen:
    """Tokens whose logprobs are computed, and where in the row they are predicted."""

    predictors: torch.Tensor  # [tokens] index in the row; an index may occur more than once
    targets: torch.Tensor  # [tokens]
    temperatures: torch.Tensor  # [tokens]


class LogprobHead(Linear):
    """Output layer that returns logprobs and entropies [tokens] of `chosen`; without it, logits.

    As a module of the model, called once per forward pass, it lets FSDP gather the weight and
    reduce its gradient once, and tensor parallelism never gathers logits.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    chosen: Chosen | None = None
    """Set before the forward pass, since the model passes only hidden states to this module."""
    keeps_hidden: bool = False
    """Whether `hidden` and its gradient are kept, for the caller to take."""
    hidden: torch.Tensor | None = None
    """[tokens, dim] hidden states that the chosen tokens are predicted from."""

    # The argument's name must stay: torchtitan shards it by name.
    def forward(self, input: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if self.chosen is None:
            return super().forward(input)
        hidden, weight, shard = input, self.weight, WHOLE_VOCABULARY
        if isinstance(weight, DTensor):
            shard = _shard_of(weight)
            weight = weight.to_local()
        if isinstance(hidden, DTensor):
            hidden = hidden.to_local()
        hidden = hidden.flatten(0, -2).index_select(0, self.chosen.predictors)
        if self.keeps_hidden and hidden.requires_grad:
            hidden.retain_grad()
            self.hidden = hidden
        return chosen_logprobs(
            hidden,
            weight,
            self.chosen.targets,
            self.chosen.temperatures,
            shard=shard,
            add_to_grad=weight.is_leaf,
        )


def _shard_of(weight: DTensor) -> VocabShard:
    mesh = weight.device_mesh
    _, offset = compute_local_shape_and_global_offset(weight.shape, mesh, weight.placements)
    group = mesh.get_group()
    return VocabShard(
        start=offset[0],
        largest=-(-len(weight) // mesh.size()),
        sum=partial(_all_reduce, op=dist.ReduceOp.SUM, group=group),
        max=partial(_all_reduce, op=dist.ReduceOp.MAX, group=group),
    )


def _all_reduce(tensor: torch.Tensor, *, op: Any, group: dist.ProcessGroup) -> torch.Tensor:
    tensor = tensor.contiguous()
    dist.all_reduce(tensor, op=op, group=group)
    return tensor
