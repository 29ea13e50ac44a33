"""Calls of a mesh in which each rank is sent its own cells of a grid, and nothing of the others."""

from typing import Any

from torchtitan_rl.batching.grid import Grid
from torchtitan_rl.core.waiting import together
from torchtitan_rl.supervision.processes import per_rank


async def call_ranks(actor: Any, endpoint: str, *grids: Grid, **arguments: Any) -> list[Any]:
    """What each rank returns, in rank order, from an endpoint that takes its cells of these grids.

    Ranks that share a model (tensor parallel) follow each other, and get the same cells in one
    message.

    Example:
        metrics = merge_metrics(await call_ranks(trainer.actor, "train_step", grid, step=3))
    """
    degree = grids[0].dp_degree
    ranks = actor.flatten("rank")
    each = len(ranks) // degree
    if each * degree != len(ranks):
        raise ValueError(f"a grid of {degree} data-parallel ranks for a mesh of {len(ranks)}")
    calls = []
    for dp_rank in range(degree):
        members = ranks.slice(rank=slice(dp_rank * each, (dp_rank + 1) * each))
        cells = [grid.of_rank(dp_rank) for grid in grids]
        calls.append(getattr(members, endpoint).call(*cells, **arguments))
    return [value for returned in await together(*calls) for value in per_rank(returned)]
