"""The frozen reference model of a run, replaced when one of its processes dies.

Its weights are those of the starting model, so a call that died is made again on its successor.
"""

from typing import Any

import torch

from torchtitan_rl.batching.grid import Grid
from torchtitan_rl.observability.timeline import Timeline
from torchtitan_rl.supervision.dispatch import RETRY, Dispatcher, Work
from torchtitan_rl.supervision.pool import (
    ActorPool,
    ActorsDiedError,
    Ready,
    ReplicaDiedError,
    Spawn,
)
from torchtitan_rl.supervision.ranks import call_ranks

RankLogprobs = list[list[torch.Tensor]]
"""For each rank, for each of its cells: [tokens] logprobs."""


class References:
    """The reference mesh of a run; one that dies is replaced by the next.

    Example:
        references = References(lambda number: spawn_reference(config, model=model))
        await references.start()
        ranks = await references.logprobs(grid)
    """

    def __init__(
        self,
        spawn: Spawn,
        *,
        deadline_seconds: float = 1800.0,
        ready: Ready | None = None,
        host_seconds: float = 600.0,
        timeline: Timeline | None = None,
    ) -> None:
        self.pool = ActorPool(
            "reference",
            spawn,
            deadline_seconds=deadline_seconds,
            ready=ready,
            host_seconds=host_seconds,
            timeline=timeline,
        )
        self._dispatcher = Dispatcher[Grid, RankLogprobs](
            self.pool, RETRY, what="compute logprobs", call=_logprobs, deadly_error=_deadly_error
        )

    async def start(self) -> None:
        """Spawn the reference."""
        await self.pool.start()

    async def stop(self) -> None:
        """End every process of the reference."""
        await self.pool.stop()

    async def logprobs(self, grid: Grid, *, step: int | None = None) -> RankLogprobs:
        """What each rank of the mesh returns, in rank order."""
        work = Work[Grid, RankLogprobs](grid)
        await self._dispatcher.run([work], step=step)
        return work.outcome


async def _logprobs(actor: Any, grids: list[Grid]) -> list[RankLogprobs]:
    return [await call_ranks(actor, "logprobs", grid) for grid in grids]


def _deadly_error(work: Work[Grid, RankLogprobs], error: ReplicaDiedError) -> Exception:
    return ActorsDiedError(f"{work.deaths} references died over one call, the last: {error}")
