"""Actors of a colocated run that are killed as a turn begins."""

from collections.abc import Awaitable, Callable, Container
from typing import Any

from torchtitan_rl.run.controller import Controller


def kill(spawned: Any) -> None:
    for process in spawned.processes:
        process.kill()


class Killer:
    """Kills an actor just after a turn of a side has begun, the first of which has the number 0."""

    def __init__(
        self,
        controller: Controller,
        *,
        generator_asleep: Container[int] = (),
        generator_awake: Container[int] = (),
        trainer_offloaded: Container[int] = (),
    ) -> None:
        self.killed: list[str] = []
        self._actors, self._turns = controller.actors, controller.turns
        self._generator = {"trainer": generator_asleep, "generators": generator_awake}
        self._trainer = {"trainer": (), "generators": trainer_offloaded}
        for side in ("trainer", "generators"):
            setattr(self._turns, side, self._killing(side, getattr(self._turns, side)))

    def _killing(self, side: str, begin: Callable[[], Awaitable[None]]) -> Any:
        begun = 0

        async def begin_and_kill() -> None:
            nonlocal begun
            changes = self._turns._turn != side
            await begin()
            if not changes:
                return
            if begun in self._generator[side]:
                self.killed.append(f"generator in turn {begun} of {side}")
                kill(self._actors.generators.pool.replicas[0].spawned)
            if begun in self._trainer[side]:
                self.killed.append(f"trainer in turn {begun} of {side}")
                kill(self._actors.trainer)
            begun += 1

        return begin_and_kill
