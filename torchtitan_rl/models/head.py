"""The last layer of a model that trains: logprobs of chosen tokens in place of logits."""

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
    """Where in a row, of which some tokens may be left out, to predict what."""

    predictors: torch.Tensor  # [tokens] where in the row each is predicted; some more than once
    targets: torch.Tensor  # [tokens]
    temperatures: torch.Tensor  # [tokens]


class LogprobHead(Linear):
    """Returns logprobs and entropies [tokens] where `chosen` says; without `chosen`, logits.

    It is the model's own module, called once in its forward pass, so that FSDP gathers its weight
    and reduces its gradient once, and tensor parallelism never gathers a logit.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    chosen: Chosen | None = None
    """Set before the forward pass: what the layers above hand on are hidden states alone."""

    # torchtitan shards the argument by its name.
    def forward(self, input: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if self.chosen is None:
            return super().forward(input)
        hidden, weight, shard = input, self.weight, WHOLE_VOCABULARY
        if isinstance(weight, DTensor):
            shard = _shard_of(weight)
            weight = weight.to_local()
        if isinstance(hidden, DTensor):
            hidden = hidden.to_local()
        return chosen_logprobs(
            hidden.flatten(0, -2).index_select(0, self.chosen.predictors),
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
