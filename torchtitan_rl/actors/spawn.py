"""Spawn an actor on processes of its own: one mesh per actor, so a death takes nobody else along.

`spawn_generator`, `spawn_grader` and `spawn_trainer` are all a script or a notebook needs.
"""

import asyncio
import os
import socket
from dataclasses import dataclass
from typing import Any

from monarch.actor import Actor, default_bootstrap_cmd, this_host
from monarch.spmd import setup_torch_elastic_env_async

from torchtitan_rl.actors.generator import VLLMGenerator
from torchtitan_rl.actors.grader import Grader
from torchtitan_rl.actors.trainer import Trainer
from torchtitan_rl.platform import worker_env
from torchtitan_rl.platform.worker_main import LOG_VARIABLE
from torchtitan_rl.tasks.task import Task

STOP_TIMEOUT_SECONDS = 3.0


@dataclass(slots=True)
class Spawned:
    """An actor and the processes it lives on."""

    actor: Any
    """Monarch's handle: `await spawned.actor.<endpoint>.call_one(...)`."""
    procs: Any
    name: str
    log_file: str | None

    async def stop(self) -> None:
        """End the processes; one that does not answer ends with this process at the latest."""
        await asyncio.wait_for(self.procs.stop("the run ended"), STOP_TIMEOUT_SECONDS)


async def spawn_generator(
    config: VLLMGenerator.Config, *, model: str, seed: int, log_file: str | None = None
) -> Spawned:
    """A generator that has loaded the HF folder `model` and is ready to sample."""
    env = worker_env(config.threads, role="generator")
    generator = await spawn(
        VLLMGenerator, config, model=str(model), seed=seed, env=env, log_file=log_file
    )
    await generator.actor.setup.call_one()
    return generator


async def spawn_grader(
    config: Grader.Config, task: Task.Config, *, log_file: str | None = None
) -> Spawned:
    """A grader with the task's reward function."""
    env = worker_env(1, role="grader")
    return await spawn(Grader, config, task=task, env=env, log_file=log_file)


async def spawn_trainer(
    config: Trainer.Config,
    *,
    model: str,
    steps: int,
    checkpoint_folder: str,
    keep: int = 2,
    seed: int = 0,
    resume: bool = False,
    log_file: str | None = None,
) -> tuple[Spawned, int]:
    """A trainer that has loaded its weights, and the number of steps it has already done."""
    ranks = config.parallelism.world_size
    threads = config.threads or max(1, (os.cpu_count() or 1) // ranks)
    trainer = await spawn(
        Trainer,
        config,
        model=str(model),
        steps=steps,
        checkpoint_folder=str(checkpoint_folder),
        keep=keep,
        seed=seed,
        env=worker_env(threads, role="trainer"),
        processes=ranks,
        distributed=True,
        log_file=log_file,
    )
    done = per_rank(await trainer.actor.setup.call(resume=resume))
    return trainer, done[0]


async def spawn(
    actor_class: type[Actor],
    *args: Any,
    env: dict[str, str],
    processes: int = 1,
    distributed: bool = False,
    log_file: str | None = None,
    **kwargs: Any,
) -> Spawned:
    """Start `processes` new processes on this host, each with one `actor_class(*args, **kwargs)`.

    With `distributed`, they also get the environment that `init_process_group` reads. Without a
    `log_file` they print to this process's console.
    """
    name = actor_class.__name__.lower()
    env = {**env, "PYTHONPATH": _python_path(), LOG_VARIABLE: log_file or ""}
    command = default_bootstrap_cmd().with_env(env)
    command.args = ["-m", "torchtitan_rl.platform.worker_main"]
    procs = this_host().spawn_procs(
        per_host={"gpus": processes}, name=name, bootstrap_command=command
    )
    if distributed:
        await setup_torch_elastic_env_async(procs, "127.0.0.1", _free_port())
    return Spawned(procs.spawn(name, actor_class, *args, **kwargs), procs, name, log_file)


def per_rank(answers: Any) -> list[Any]:
    """The answers of a mesh call, in rank order."""
    return list(answers.values())


def _python_path() -> str:
    # Workers do not get this process's sys.path; tasks and plug-ins in the working directory must
    # be importable there too.
    return os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
