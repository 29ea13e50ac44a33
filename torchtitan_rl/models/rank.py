"""One process's share of a model on a mesh: the common part of trainer and reference."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.attention import create_varlen_metadata_for_document

from torchtitan_rl.batching.documents import (
    Document,
    Segment,
    needed,
    positions,
    predecessors,
    segment_ids,
    segments,
)
from torchtitan_rl.batching.microbatch import Microbatch
from torchtitan_rl.config.parallelism import Parallelism
from torchtitan_rl.models.cpu.attention import AttentionPlan
from torchtitan_rl.models.head import Chosen, LogprobHead
from torchtitan_rl.models.parallel import build_parallel_model
from torchtitan_rl.models.router_replay import replay_routing
from torchtitan_rl.models.spec import model_spec
from torchtitan_rl.platform import Dtype, device_type
from torchtitan_rl.platform.switches import enabled


@dataclass(slots=True)
class Predicted:
    """The tokens of a microbatch that train, flattened: every tensor is [tokens]."""

    logprobs: torch.Tensor
    entropies: torch.Tensor
    streams: dict[str, torch.Tensor]
    """Streams of the microbatch at these tokens."""
    sequence_ids: torch.Tensor
    """Number of the sequence that each token belongs to."""
    hidden: torch.Tensor | None = None
    """[tokens, dim] states that the tokens are predicted from, if they were asked for; after the
    backward pass with their gradient."""

    def where(self, chosen: torch.Tensor) -> "Predicted":
        """The predictions at a selection of the tokens."""
        if chosen.all():
            return self
        streams = {name: stream[chosen] for name, stream in self.streams.items()}
        return Predicted(
            self.logprobs[chosen], self.entropies[chosen], streams, self.sequence_ids[chosen]
        )


class ModelRank:
    """A model in the process group of its mesh; its memory is allocated, its weights not loaded."""

    def __init__(
        self,
        folder: str,
        parallelism: Parallelism,
        *,
        dtype: Dtype,
        seed: int,
        activation_checkpoint: Literal["none", "full"] = "none",
    ) -> None:
        torch.manual_seed(seed)
        dist.init_process_group("gloo" if device_type() == "cpu" else "cuda:nccl,cpu:gloo")
        self.device = torch.device(device_type())
        if device_type() == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        # As torchtitan does: recomputation in the backward pass needs the thread that set it up.
        torch.autograd.set_multithreading_enabled(False)
        self.spec = model_spec(folder)
        self.adapter = self.spec.state_dict_adapter(self.spec.model, folder)
        self.model, self.parallel_dims = build_parallel_model(
            self.spec, parallelism, dtype=dtype, activation_checkpoint=activation_checkpoint
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
        where, _ = _needed(cell.documents)
        return replay_routing(self.model, cell.streams["routed_experts"][where])

    def predict(self, cell: Microbatch, *, keep_hidden: bool = False) -> Predicted:
        """A forward pass: logprobs of the tokens that train; token i is predicted at i - 1."""
        row = segments(cell.documents)
        where, documents = _needed(cell.documents)
        trains = _trained(cell)
        streams = {n: stream[trains].to(self.device) for n, stream in cell.streams.items()}
        # Echo tokens were not sampled, so there is no sampling temperature.
        streams["temperature"][cell.echoes[trains]] = 1.0
        # Every predictor is among the computed tokens, which keep the order of the row.
        predictors = torch.searchsorted(where, predecessors(row)[trains])
        predictors, sequence_ids = (
            values.to(self.device) for values in (predictors, segment_ids(row)[trains])
        )
        self.head.chosen = Chosen(predictors, streams["tokens"], streams["temperature"])
        self.head.keeps_hidden = keep_hidden
        tokens, places = (
            t[where].unsqueeze(0).to(self.device) for t in (cell.streams["tokens"], positions(row))
        )
        plan = self._attention_plan(segments(documents), places)
        logprobs, entropies = self.model(tokens, places, plan)
        hidden, self.head.hidden = self.head.hidden, None
        return Predicted(logprobs, entropies, streams, sequence_ids, hidden)

    def _attention_plan(self, row: list[Segment], places: torch.Tensor) -> Any:
        if device_type() == "cpu":
            return AttentionPlan(row)
        return create_varlen_metadata_for_document(places)

    def clip_gradients(self, most: float) -> torch.Tensor:
        """Scale the gradients down to a norm of `most`; returns the norm they had."""
        return dist_utils.clip_grad_norm_(list(self.model.parameters()), most, foreach=True)

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


def _trained(cell: Microbatch) -> torch.Tensor:
    """Indices in the row of the tokens that train, by RL or by echo."""
    return (cell.streams["loss_mask"] | cell.echoes).nonzero().squeeze(-1)


def _needed(documents: Sequence[Document]) -> tuple[torch.Tensor, Sequence[Document]]:
    if enabled("last_token"):
        return needed(documents)
    return torch.arange(sum(document.tokens for document in documents)), documents
