"""Router replay: the trainer uses the experts that the generator chose, and weighs them itself.

A tiny difference in rounding, or a policy one step older, can send a token to other experts, and
its logprob jumps. With router replay only the *selection* comes from the generator; the scores come
from the live router, so its gate still learns.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.models.common.moe import TokenChoiceTopKRouter


class ReplayRouter(TokenChoiceTopKRouter):
    """torchtitan's router, with the experts given by `selection` when it is set."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    selection: torch.Tensor | None = None
    """[tokens, top_k] experts of the current microbatch, in row order; set by `replay_routing`."""

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores, chosen, all_scores = super().forward(x_BLD, expert_bias_E)
        if self.selection is None:
            return scores, chosen, all_scores
        rows, length, _ = all_scores.shape
        if len(self.selection) != rows * length:
            raise ValueError(
                f"routing to replay has {len(self.selection)} tokens; the forward pass has "
                f"{rows} rows of {length}"
            )
        chosen = _placed_like(all_scores, self.selection.view(rows, length, self.top_k))
        scores = all_scores.gather(dim=-1, index=chosen)
        if self.route_norm:
            scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
        return scores * self.route_scale, chosen, all_scores


def _placed_like(scores: torch.Tensor, selection: torch.Tensor) -> torch.Tensor:
    if not isinstance(scores, DTensor):
        return selection
    # Every rank has the whole selection, so that taking a part needs no communication.
    mesh = scores.device_mesh
    whole = DTensor.from_local(selection, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=scores.placements)


@contextmanager
def replay_routing(model: nn.Module, routing: torch.Tensor | None) -> Iterator[None]:
    """Replay `routing` in every forward pass and recomputation inside the block.

    `routing` is [tokens, MoE layers, top_k] expert numbers: the tokens in row order, and the
    layers with experts in the order of their numbers (dense layers have no entry). None replays
    nothing, for a microbatch of padding alone. The backward pass must be inside the block too:
    activation checkpointing runs the routers again.

    Example:
        with replay_routing(model, routing):  # [rows * length, MoE layers, top_k]
            loss(model(tokens, positions)).backward()
    """
    routers = find_routers(model)
    _clear(routers)
    try:
        if routing is not None:
            _check(routers, routing)
            device = next(model.parameters()).device
            selections = routing.to(device, torch.int64, non_blocking=True).unbind(dim=1)
            for router, selection in zip(routers, selections, strict=True):
                router.selection = selection.contiguous()
        yield
    finally:
        _clear(routers)


def find_routers(model: nn.Module) -> list[ReplayRouter]:
    """Routers of a torchtitan model, in the order of their layers' numbers.

    Found by type, not by name: activation checkpointing inserts modules with names of its own.
    """
    layers = sorted(model.get_submodule("layers").named_children(), key=lambda item: int(item[0]))
    return [
        module
        for _, layer in layers
        for module in layer.modules()
        if isinstance(module, ReplayRouter)
    ]


def _clear(routers: list[ReplayRouter]) -> None:
    for router in routers:
        router.selection = None


def _check(routers: list[ReplayRouter], routing: torch.Tensor) -> None:
    if not routers:
        raise ValueError("the model has no experts: there is no routing to replay")
    layers, top_k = len(routers), routers[0].top_k
    if routing.dim() != 3 or routing.shape[1:] != (layers, top_k):
        raise ValueError(
            f"routing to replay has the shape {tuple(routing.shape)}; the model needs "
            f"[tokens, {layers} layers with experts, top {top_k}]"
        )
