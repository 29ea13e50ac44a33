"""The actors of a run: who is there, on which GPUs, with which logs."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from typing import Any

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.core.waiting import together
from torchtitan_rl.observability.run_folder import RunFolder
from torchtitan_rl.observability.timeline import Timeline
from torchtitan_rl.supervision.generators import Generators
from torchtitan_rl.supervision.graders import Graders
from torchtitan_rl.supervision.spawn import (
    Spawned,
    spawn_environment,
    spawn_generator,
    spawn_grader,
    spawn_reference,
    spawn_trainer,
)


class ActorSet:
    """Spawns the actors side by side, and ends every process they live on.

    Example:
        actors = ActorSet(config, folder, interactive=False)
        await actors.start()
        completions = await actors.generators.sample([[7, 8]], [SamplingConfig()], ["a name"])
        await actors.stop()
    """

    trainer: Spawned
    generators: Generators
    graders: Graders
    environment: Spawned | None = None
    """Only if a task has tools, or answers the model."""
    reference: Spawned | None = None
    """Only if a loss compares with the starting model."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        *,
        interactive: bool,
        timeline: Timeline | None = None,
    ) -> None:
        self._config, self._folder, self._interactive = config, folder, interactive
        self._model = str(config.model_folder)
        self._spawned: list[Spawned] = []
        self.generators = Generators(
            self._spawn_generator,
            config.generator_replicas,
            deadline_seconds=config.deadline_seconds,
            timeline=timeline,
        )
        self.graders = Graders(
            self._spawn_grader, deadline_seconds=config.deadline_seconds, timeline=timeline
        )

    async def start(self) -> None:
        """Spawn them all; each is ready when this returns."""
        starting = [self._start_trainer()]
        if not self._config.train_from:
            starting += [self.generators.start(), self.graders.start()]
            if self._interactive:
                starting.append(self._start_environment())
        if self._config.has_reference:
            starting.append(self._start_reference())
        await together(*starting)

    @property
    def hosts(self) -> set[str]:
        """The machines between which weights travel."""
        return {self.trainer.host, *self.generators.hosts}

    async def stop(self) -> None:
        """Stop every process of the run."""
        others = [spawned.stop() for spawned in self._spawned]
        await asyncio.gather(
            self.generators.stop(), self.graders.stop(), *others, return_exceptions=True
        )
        # What the `file` transport leaves if its process is killed before it has cleaned up.
        shutil.rmtree(self._folder.weights, ignore_errors=True)

    async def _start_trainer(self) -> None:
        config = self._config
        self.trainer = await self._own(
            "trainer",
            spawn_trainer,
            config.trainer,
            model=self._model,
            steps=config.steps,
            checkpoint_folder=str(self._folder.checkpoints),
            tokens_folder=str(self._folder.tokens),
            weights_folder=str(self._folder.weights),
            keep=config.checkpoint.keep,
            seed=config.seed,
            resume=config.resume,
            gpus=config.gpus[0],
        )

    async def _spawn_generator(self, number: int) -> Spawned:
        config = self._config
        own = config.gpus[1][number * config.generator.tensor_parallel_degree :]
        return await spawn_generator(
            config.generator,
            model=self._model,
            seed=config.seed,
            gpus=own[: config.generator.tensor_parallel_degree],
            log_file=self._folder.log_file(f"generator-{number}" if number else "generator"),
        )

    async def _spawn_grader(self) -> Spawned:
        config, log_file = self._config, self._folder.log_file("grader")
        return await spawn_grader(config.grader, config.task, seed=config.seed, log_file=log_file)

    async def _start_environment(self) -> None:
        config = self._config
        self.environment = await self._own(
            "environment", spawn_environment, config.environment, config.task, seed=config.seed
        )

    async def _start_reference(self) -> None:
        config = self._config
        self.reference = await self._own(
            "reference",
            spawn_reference,
            config.reference,
            model=self._model,
            gpus=config.gpus[2],
        )

    async def _own(
        self, who: str, spawn: Callable[..., Awaitable[Spawned]], *args: Any, **kwargs: Any
    ) -> Spawned:
        spawned = await spawn(*args, **kwargs, log_file=self._folder.log_file(who))
        self._spawned.append(spawned)
        return spawned
