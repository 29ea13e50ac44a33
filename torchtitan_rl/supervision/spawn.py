"""Spawn an actor on processes of its own: one mesh per actor, so that a death ends no other actor.

`spawn_generator`, `spawn_grader`, `spawn_environment`, `spawn_trainer` and `spawn_reference` are
all that a script or a notebook needs.
"""

from dataclasses import fields
from typing import Any

from torchtitan_rl.actors.backends import generator_class, trainer_class
from torchtitan_rl.actors.environment import Environment
from torchtitan_rl.actors.grader import Grader
from torchtitan_rl.actors.reference import Reference
from torchtitan_rl.config import (
    EnvironmentConfig,
    GeneratorConfig,
    GraderConfig,
    ReferenceConfig,
    TaskConfig,
    TrainerConfig,
)
from torchtitan_rl.config.checkpoint import AsyncMode
from torchtitan_rl.platform import Role, default_threads, worker_env
from torchtitan_rl.platform.parent import adopt_orphans
from torchtitan_rl.supervision.placement import Placement
from torchtitan_rl.supervision.processes import (
    HostEnvironment,
    Spawned,
    end_all_processes,
    per_rank,
    spawn,
    start_monarch,
    temporary_folder,
)
from torchtitan_rl.supervision.spawned_trainer import SpawnedTrainer

__all__ = [
    "Spawned",
    "SpawnedTrainer",
    "adopt_orphans",
    "end_all_processes",
    "per_rank",
    "spawn",
    "spawn_environment",
    "spawn_generator",
    "spawn_grader",
    "spawn_reference",
    "spawn_trainer",
    "start_monarch",
]


async def spawn_generator(
    config: GeneratorConfig,
    *,
    model: str,
    seed: int,
    placement: Placement | None = None,
    log_file: str | None = None,
) -> Spawned:
    """A generator that has loaded the HF folder `model` and is ready to sample."""
    placement = placement or Placement()
    generator = await spawn(
        generator_class(config),
        config,
        **dict[str, Any](config.kwargs),
        model=str(model),
        seed=seed,
        env=_environment("generator", config.threads, placement),
        placement=placement,
        # vLLM's ranks meet by a file and sockets, which it does not remove if it is killed.
        own_temporary_folder=True,
        log_file=log_file,
    )
    return await _ready(generator, generator.actor.setup.call_one())


async def spawn_grader(
    config: GraderConfig,
    task: TaskConfig,
    *,
    seed: int = 0,
    placement: Placement | None = None,
    log_file: str | None = None,
) -> Spawned:
    """A grader with the task's reward function."""
    placement = placement or Placement()
    grader = await spawn(
        Grader,
        config,
        task=task,
        seed=seed,
        env=_environment("grader", 1, placement),
        placement=placement,
        log_file=log_file,
    )
    return await _ready(grader, grader.actor.setup.call_one())


async def spawn_environment(
    config: EnvironmentConfig,
    task: TaskConfig,
    *,
    seed: int = 0,
    placement: Placement | None = None,
    log_file: str | None = None,
) -> Spawned:
    """An environment with the task's tools."""
    placement = placement or Placement()
    environment = await spawn(
        Environment,
        config,
        task=task,
        seed=seed,
        env=_environment("environment", 1, placement),
        placement=placement,
        log_file=log_file,
    )
    return await _ready(environment, environment.actor.setup.call_one())


async def spawn_trainer(
    config: TrainerConfig,
    *,
    model: str,
    steps: int,
    checkpoint_folder: str = "checkpoints",
    tokens_folder: str = "tokens",
    weights_folder: str = "",
    keep: int = 2,
    async_mode: AsyncMode = "disabled",
    seed: int = 0,
    resume: bool = False,
    placement: Placement | None = None,
    log_file: str | None = None,
) -> SpawnedTrainer:
    """A trainer that has loaded its weights: from its latest checkpoint or from `model`. The
    learning rate is laid out for `steps`. Without a `weights_folder`, what the `file` transport
    publishes is in a temporary folder."""
    placement = placement or Placement(config.parallelism.world_size)
    trainer = await spawn(
        trainer_class(config),
        config,
        **dict[str, Any](config.kwargs),
        model=str(model),
        steps=steps,
        checkpoint_folder=str(checkpoint_folder),
        tokens_folder=str(tokens_folder),
        weights_folder=str(weights_folder) or temporary_folder("weights"),
        keep=keep,
        async_mode=async_mode,
        seed=seed,
        env=_environment("trainer", config.threads, placement),
        placement=placement,
        distributed=True,
        log_file=log_file,
    )
    await _ready(trainer, trainer.actor.setup.call(resume=resume))
    own = {field.name: getattr(trainer, field.name) for field in fields(trainer)}
    return SpawnedTrainer(**own, config=config, model=str(model))


async def spawn_reference(
    config: ReferenceConfig,
    *,
    model: str,
    placement: Placement | None = None,
    log_file: str | None = None,
) -> Spawned:
    """A frozen reference model that has loaded the HF folder `model`."""
    placement = placement or Placement(config.parallelism.world_size)
    reference = await spawn(
        Reference,
        config,
        model=str(model),
        env=_environment("reference", config.threads, placement),
        placement=placement,
        distributed=True,
        log_file=log_file,
    )
    return await _ready(reference, reference.actor.setup.call())


def _environment(role: Role, threads: int, placement: Placement) -> HostEnvironment:
    """Environment of an actor's processes, by the number of their host."""

    def of_host(number: int) -> dict[str, str]:
        compute = placement.hosts[number].compute
        each = threads or default_threads(placement.per_host, compute)
        return worker_env(each, role=role, gpus=placement.gpus[number], compute=compute)

    return of_host


async def _ready(spawned: Spawned, setup: Any) -> Spawned:
    """Wait for an actor's setup; if that fails or is given up, leave no process behind."""
    try:
        await spawned.watched(setup)
    except BaseException:
        await spawned.stop()
        raise
    return spawned
