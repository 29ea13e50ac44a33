"""One process's share of a model on a mesh: the common part of trainer and reference."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.distributed import utils as dist_utils

from torchtitan_rl.batching.documents import (
    Document,
    Segment,
    positions,
    predecessors,
    segment_ids,
    segments,
)
from torchtitan_rl.batching.grid import RankCells
from torchtitan_rl.batching.microbatch import Microbatch
from torchtitan_rl.config.parallelism import Parallelism
from torchtitan_rl.config.trainer import Checkpointing, GradientSync
from torchtitan_rl.models.cpu.attention import AttentionPlan
from torchtitan_rl.models.cuda.attention import VarlenPlan, try_attention, varlen_plan
from torchtitan_rl.models.head import Chosen, LogprobHead
from torchtitan_rl.models.hf import moe_layers, read_hf_config
from torchtitan_rl.models.parallel import (
    build_parallel_model,
    discard_gradients,
    expect_backward,
)
from torchtitan_rl.models.router_replay import replay_routing
from torchtitan_rl.models.spec import model_spec
from torchtitan_rl.platform import Dtype, device_type


@dataclass(slots=True)
class Predicted:
    """The tokens of a microbatch that train, flattened: every tensor is [tokens].

    What tokens are chosen by is on the CPU: to choose by it waits for no GPU.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor
    streams: dict[str, torch.Tensor]
    """Streams of the microbatch at these tokens."""
    sequence_ids: torch.Tensor
    """Number of the sequence that each token belongs to; on the CPU."""
    sequences: int
    """Sequences of the microbatch."""
    by_rl: torch.Tensor
    """Whether a token trains by RL, else by echo; on the CPU."""
    hidden: torch.Tensor | None = None
    """[tokens, dim] states that the tokens are predicted from, if they were asked for; after the
    backward pass with their gradient."""

    def where(self, chosen: torch.Tensor) -> "Predicted":
        """The predictions at a selection of the tokens, a mask on the CPU."""
        if chosen.all():
            return self
        own = chosen.nonzero().squeeze(-1)
        index = _sent(own, self.logprobs.device)
        return replace(
            self,
            logprobs=self.logprobs.index_select(0, index),
            entropies=self.entropies.index_select(0, index),
            streams={name: stream.index_select(0, index) for name, stream in self.streams.items()},
            sequence_ids=self.sequence_ids[own],
            by_rl=self.by_rl[own],
            hidden=None,
        )


def join_process_group() -> torch.device:
    """Join the process group of this process's mesh; returns the device that it computes on."""
    dist.init_process_group("gloo" if device_type() == "cpu" else "cuda:nccl,cpu:gloo")
    device = torch.device(device_type())
    if device_type() == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        try_attention(device)
    return device


class ModelRank:
    """A model in the process group of its mesh; its memory is allocated, its weights not loaded.

    The layers compute rows of a multiple of `row_multiple` tokens, the last of which are padding.
    `join` joins that group and says on which device to compute; memory is allocated in the context
    `allocating`. A trace brings its own of both.
    """

    def __init__(
        self,
        folder: str,
        parallelism: Parallelism,
        *,
        dtype: Dtype,
        seed: int,
        activation_checkpoint: Checkpointing = "none",
        compile: bool = False,
        inference: bool = False,
        row_multiple: int = 1,
        join: Callable[[], torch.device] = join_process_group,
        allocating: AbstractContextManager[object] | None = None,
    ) -> None:
        torch.manual_seed(seed)
        self.device = join()
        # As torchtitan does: recomputation in the backward pass needs the thread that set it up.
        torch.autograd.set_multithreading_enabled(False)
        # Experts would be chosen for padding, too.
        self.row_multiple = 1 if moe_layers(read_hf_config(folder)) else row_multiple
        self.spec = model_spec(folder)
        self.adapter = self.spec.state_dict_adapter(self.spec.model, folder)
        self.model, self.parallel_dims = build_parallel_model(
            self.spec,
            parallelism,
            dtype=dtype,
            activation_checkpoint=activation_checkpoint,
            compile=compile,
            inference=inference,
            device=self.device,
            allocating=allocating,
        )

        head = self.model.get_submodule("lm_head")
        assert isinstance(head, LogprobHead)
        self.head = head

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank of this process: its column of a grid."""
        if not self.parallel_dims.dp_enabled:
            return 0
        return self.parallel_dims.get_mesh("batch").get_local_rank()

    def check_own(self, grid: RankCells) -> None:
        """Refuse the cells of another rank: they would be trained twice, and others not at all."""
        if grid.dp_rank != self.dp_rank:
            raise ValueError(
                f"data-parallel rank {self.dp_rank} was sent the cells of rank {grid.dp_rank}: the "
                "order of the ranks is not that of the mesh"
            )

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of a tensor-parallel group, whose ranks compute the
        same."""
        return dist.get_rank() % self.parallel_dims.tp == 0

    def replaying(self, cell: Microbatch, *, on: bool) -> AbstractContextManager[None]:
        """Router replay for a microbatch: inside the block its tokens go to the experts that its
        episodes name; padding, which has none, goes where the router sends it."""
        if not (on and cell.real):
            return replay_routing(self.model, None)
        return replay_routing(self.model, cell.streams["routed_experts"])

    def predict(self, cell: Microbatch, *, keep_hidden: bool = False) -> Predicted:
        """A forward pass: logprobs of the tokens that train; token i is predicted at i - 1."""
        row = segments(cell.documents)
        computed = segments([*cell.documents, *self._padding(cell)])
        trains = _trained(cell)
        own = {name: stream[trains] for name, stream in cell.streams.items()}
        # Echo tokens were not sampled, so there is no sampling temperature.
        own["temperature"] = own["temperature"].masked_fill(cell.echoes[trains], 1.0)
        streams = {name: _sent(stream, self.device) for name, stream in own.items()}
        predictors = _sent(predecessors(row)[trains], self.device)
        self.head.chosen = Chosen(predictors, streams["tokens"], streams["temperature"])
        self.head.keeps_hidden = keep_hidden
        row_tokens = functional.pad(cell.streams["tokens"], (0, computed[-1].stop - cell.tokens))
        tokens, places = (
            _sent(t.unsqueeze(0), self.device) for t in (row_tokens, positions(computed))
        )
        plan = self._attention_plan(computed)
        logprobs, entropies = self.model(tokens, places, plan)
        hidden, self.head.hidden = self.head.hidden, None
        sequence_ids, by_rl = segment_ids(row)[trains], own["loss_mask"]
        return Predicted(logprobs, entropies, streams, sequence_ids, len(row), by_rl, hidden)

    def _padding(self, cell: Microbatch) -> list[Document]:
        """What the layers compute after a row."""
        lacking = -cell.tokens % self.row_multiple
        return [Document(lacking)] if lacking else []

    def _attention_plan(self, row: list[Segment]) -> AttentionPlan | VarlenPlan:
        return AttentionPlan(row) if device_type() == "cpu" else varlen_plan(row, self.device)

    def expect_backward(self, *, last: bool, sync: GradientSync) -> None:
        """Say before a forward pass whether its backward pass is the last of the update."""
        expect_backward(self.model, last=last, sync=sync)

    def discard_gradients(self) -> None:
        """Forget the gradients of an update that an error has ended."""
        discard_gradients(self.model)

    def reshard(self) -> None:
        """Keep this process's share of the weights only: after a pass without gradients FSDP still
        has the outermost ones whole."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def clip_gradients(self, most: float) -> torch.Tensor:
        """Scale the gradients down to a norm of `most`; returns the norm they had."""
        return dist_utils.clip_grad_norm_(
            list(self.model.parameters()),
            most,
            foreach=True,
            ep_enabled=self.parallel_dims.ep_enabled,
        )

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Gradients by parameter name, gathered from all ranks."""
        return {
            name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).cpu().clone()
            for name, p in self.model.named_parameters()
            if p.grad is not None
        }

    def logprobs(self, cell: Microbatch) -> torch.Tensor:
        """[tokens] logprobs without gradient; NaN at tokens that do not train."""
        values = torch.full((cell.tokens,), torch.nan)
        with torch.no_grad():
            values[_trained(cell)] = self.predict(cell).logprobs.float().cpu()
        return values


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the CPU on another device. The copy takes its turn there and is not waited for,
    but what is not pinned CUDA has read when this returns: the tensor may then be overwritten."""
    return tensor.to(device, non_blocking=True)


def _trained(cell: Microbatch) -> torch.Tensor:
    """Indices in the row of the tokens that train, by RL or by echo."""
    return (cell.streams["loss_mask"] | cell.echoes).nonzero().squeeze(-1)
