"""Turns of trainer and generators that share their GPUs (`placement colocated`): one works, and the
others have given back what memory they can.

Nobody plans the turns: whoever is about to call one side asks for its turn first, and the sides
change only if it is the other's. So a checkpoint after a step, or the steps of a warm start, keep
the trainer's turn, and steps without episodes the generators'.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from torchtitan_rl.run.actor_set import ActorSet
from torchtitan_rl.supervision.spawn import per_rank

GIB = 2**30


class Turns:
    """Gives the GPUs to the trainer or to the generators; where each has its own, does nothing.

    Example:
        turns = Turns(actors, call, colocated=True)
        await turns.trainer()     # the generators sleep
        ...
        await turns.generators()  # the trainer sleeps, the generators have the newest weights
    """

    def __init__(
        self,
        actors: ActorSet,
        call: Callable[[str, str, Awaitable], Awaitable[Any]],
        *,
        colocated: bool,
    ) -> None:
        self._actors, self._call, self._colocated = actors, call, colocated
        self._turn: Literal["trainer", "generators", "nobody"] = "trainer"  # see ActorSet.start
        self._metrics: dict[str, float] = {}

    async def trainer(self) -> None:
        """Return when it is the trainer's turn."""
        if not self._colocated or self._turn == "trainer":
            return
        started = self._begin()
        given_back = await self._actors.generators.sleep()
        actor = self._actors.trainer.actor
        await self._call("trainer", "wake", actor.wake.call())
        self._end("trainer", started, {"turns/generator_gib": given_back / GIB})

    async def generators(self) -> None:
        """Return when it is the generators' turn, and they serve the newest weights."""
        if not self._colocated or self._turn == "generators":
            return
        started = self._begin()
        actor = self._actors.trainer.actor
        given_back = per_rank(await self._call("trainer", "sleep", actor.sleep.call()))
        await self._actors.generators.wake()
        self._end("generators", started, {"turns/trainer_gib": sum(given_back) / GIB})

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the turns since the last call."""
        taken, self._metrics = self._metrics, {}
        return taken

    def _begin(self) -> float:
        # Until all have changed: if that is interrupted, the next turn begins with both sides, and
        # for a side that has changed already it is nothing.
        self._turn = "nobody"
        return time.perf_counter()

    def _end(
        self, turn: Literal["trainer", "generators"], started: float, measured: dict[str, float]
    ) -> None:
        self._turn = turn
        seconds = self._metrics.get("turns/seconds", 0.0) + time.perf_counter() - started
        self._metrics |= {**measured, "turns/seconds": seconds}
