"""Spawn an actor on processes of its own: one mesh per actor, so a death takes nobody else along.

`spawn_generator`, `spawn_grader`, `spawn_environment`, `spawn_trainer` and `spawn_reference` are
all that a script or a notebook needs.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import monarch.actor
import psutil
from monarch.actor import Actor, default_bootstrap_cmd, shutdown_context, this_host
from monarch.spmd import setup_torch_elastic_env_async

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
from torchtitan_rl.observability.console import console
from torchtitan_rl.platform import worker_env
from torchtitan_rl.platform.worker_main import LOG_VARIABLE, PARENT_VARIABLE
from torchtitan_rl.supervision.process_info import ProcessInfo
from torchtitan_rl.weight_sync.file import JANITOR

STOP_SECONDS = 0.5
"""How long processes get to end by themselves."""
START_SECONDS_VARIABLE = "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE"
"""How long Monarch waits for a new process to call back; see platform/third_party.py."""
REAP_SECONDS = 2.0
"""How long a killed process may take to give its memory back."""


@dataclass(slots=True)
class Spawned:
    """An actor and the processes it lives on."""

    actor: Any
    """Monarch's handle: `await spawned.actor.<endpoint>.call_one(...)`."""
    procs: Any
    processes: list[psutil.Process]
    host: str = ""
    """Which machine they are on."""

    @property
    def alive(self) -> bool:
        """Whether none of the processes has ended."""
        try:
            return all(p.status() != psutil.STATUS_ZOMBIE for p in self.processes)
        except psutil.NoSuchProcess:
            return False

    async def stop(self) -> None:
        """End the processes and whatever they have started, also when they hang.

        What must be kept was written by an endpoint that has answered, so nothing is lost by not
        waiting for Python and vLLM to take themselves apart, which takes seconds.
        """
        family = list(self.processes)
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                family += process.children(recursive=True)
        # Monarch first: it must know that what follows is no accident.
        stopping = self.procs.stop("the run ended")
        try:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(stopping, STOP_SECONDS)
        finally:  # also when whoever stops it is cancelled
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        await asyncio.to_thread(psutil.wait_procs, family, timeout=STOP_SECONDS)


async def spawn_generator(
    config: GeneratorConfig,
    *,
    model: str,
    seed: int,
    gpus: Sequence[int] | None = None,
    log_file: str | None = None,
) -> Spawned:
    """A generator that has loaded the HF folder `model` and is ready to sample."""
    env = worker_env(config.threads, role="generator", gpus=gpus)
    generator = await spawn(
        generator_class(config),
        config,
        **dict[str, Any](config.kwargs),
        model=str(model),
        seed=seed,
        env=env,
        log_file=log_file,
    )
    return await _ready(generator, generator.actor.setup.call_one())


async def spawn_grader(
    config: GraderConfig, task: TaskConfig, *, seed: int = 0, log_file: str | None = None
) -> Spawned:
    """A grader with the task's reward function."""
    env = worker_env(1, role="grader")
    grader = await spawn(Grader, config, task=task, seed=seed, env=env, log_file=log_file)
    return await _ready(grader, grader.actor.setup.call_one())


async def spawn_environment(
    config: EnvironmentConfig, task: TaskConfig, *, seed: int = 0, log_file: str | None = None
) -> Spawned:
    """An environment with the task's tools."""
    env = worker_env(1, role="environment")
    environment = await spawn(Environment, config, task=task, seed=seed, env=env, log_file=log_file)
    return await _ready(environment, environment.actor.setup.call_one())


async def spawn_trainer(
    config: TrainerConfig,
    *,
    model: str,
    steps: int,
    checkpoint_folder: str,
    tokens_folder: str = "tokens",
    weights_folder: str = "weights",
    keep: int = 2,
    seed: int = 0,
    resume: bool = False,
    gpus: Sequence[int] | None = None,
    log_file: str | None = None,
) -> Spawned:
    """A trainer that has loaded its weights: from its latest checkpoint or from `model`."""
    ranks = config.parallelism.world_size
    threads = config.threads or max(1, (os.cpu_count() or 1) // ranks)
    trainer = await spawn(
        trainer_class(config),
        config,
        **dict[str, Any](config.kwargs),
        model=str(model),
        steps=steps,
        checkpoint_folder=str(checkpoint_folder),
        tokens_folder=str(tokens_folder),
        weights_folder=str(weights_folder),
        keep=keep,
        seed=seed,
        env=worker_env(threads, role="trainer", gpus=gpus),
        processes=ranks,
        distributed=True,
        log_file=log_file,
    )
    return await _ready(trainer, trainer.actor.setup.call(resume=resume))


async def spawn_reference(
    config: ReferenceConfig,
    *,
    model: str,
    gpus: Sequence[int] | None = None,
    log_file: str | None = None,
) -> Spawned:
    """A frozen reference model that has loaded the HF folder `model`."""
    reference = await spawn(
        Reference,
        config,
        model=str(model),
        env=worker_env(config.threads, role="reference", gpus=gpus),
        processes=config.parallelism.world_size,
        distributed=True,
        log_file=log_file,
    )
    return await _ready(reference, reference.actor.setup.call())


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
    outlive_workers()
    name = actor_class.__name__.lower()
    env = {**env, "PYTHONPATH": _python_path(), LOG_VARIABLE: log_file or ""}
    env[PARENT_VARIABLE] = str(os.getpid())
    command = default_bootstrap_cmd().with_env(env)
    command.args = ["-m", "torchtitan_rl.platform.worker_main"]
    procs = await _start_processes(name, processes, command)
    try:
        if distributed:
            await setup_torch_elastic_env_async(procs, "127.0.0.1", _free_port())
        # Told apart from other children by asking: meshes may start side by side.
        infos = per_rank(await procs.spawn("process_info", ProcessInfo).get.call())
        actor = procs.spawn(name, actor_class, *args, **kwargs)
        return Spawned(actor, procs, [psutil.Process(pid) for pid, _ in infos], infos[0][1])
    except BaseException:
        await _give_up(procs)
        raise


async def _give_up(procs: Any) -> None:
    with contextlib.suppress(Exception):
        await asyncio.wait_for(procs.stop("spawning failed"), STOP_SECONDS)


async def _start_processes(name: str, processes: int, command: Any) -> Any:
    """A mesh of new processes. On a busy machine one may not start in time: tried once more."""
    for attempt in (1, 2):
        procs = this_host().spawn_procs(
            per_host={"gpus": processes}, name=name, bootstrap_command=command
        )
        try:
            await procs.initialized
            return procs
        except BaseException as error:
            await _give_up(procs)
            if "Timeout" not in str(error):
                raise
            reason, cause = f"the {name}'s process did not start: {error}", error
        if attempt == 1:
            console.print(f"{reason}; trying once more", markup=False)
    raise TimeoutError(
        f"{reason}. Is the machine very busy? Set {START_SECONDS_VARIABLE}=300s to wait longer"
    ) from cause


def end_all_processes() -> None:
    """For the end of a program: every process it has started is gone, and Monarch with them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt but this
    janitors = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if JANITOR in process.cmdline():
                janitors.append(process)  # it ends by itself, when it has cleaned up after the dead
            else:
                process.kill()
    psutil.wait_procs(janitors, timeout=REAP_SECONDS)
    # Monarch would do this while the interpreter exits, and print a traceback if it is too slow.
    with contextlib.suppress(Exception):
        shutdown_context(host_timeout=0.3).get(timeout=1.0)
    _reap_children()


def _reap_children() -> None:
    """Collect what was killed, so that not even a zombie of it is left: nobody else may do so."""
    deadline = time.monotonic() + REAP_SECONDS
    with contextlib.suppress(ChildProcessError):  # none is left
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)


def adopt_orphans() -> None:
    """Whatever a dead worker leaves behind becomes a child of this process, which ends it too."""
    set_child_subreaper = 36  # linux/prctl.h
    ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def start_monarch(log_file: str | None = None) -> None:
    """Start Monarch's client in this process; what it says while it starts goes to `log_file`."""
    if log_file is None:
        monarch.actor.context()
        return
    stderr = os.dup(2)
    with open(log_file, "a") as log:
        os.dup2(log.fileno(), 2)
        try:
            monarch.actor.context()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def outlive_workers() -> None:
    """A dead worker is an error for whoever waits for it, not the end of this process."""
    monarch.actor.unhandled_fault_hook = lambda failure: None


async def _ready(spawned: Spawned, setup: Any) -> Spawned:
    """Wait for an actor's setup; if that fails or is given up, leave no process behind."""
    try:
        await setup
    except BaseException:
        await spawned.stop()
        raise
    return spawned


def per_rank(answers: Any) -> list[Any]:
    """The answers of a mesh call, in rank order."""
    return list(answers.values())


def _python_path() -> str:
    # Monarch does not hand on this process's sys.path, and what a task or a plug-in is imported
    # from must be found in the workers too.
    return os.pathsep.join(path or os.getcwd() for path in ["", *sys.path])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
