"""Classes of the generator and trainer backends, imported only when they are looked up."""

from typing import Any

from torchtitan_rl.actors.interfaces import (
    ColocatedGeneratorProtocol,
    ColocatedTrainerProtocol,
    GeneratorProtocol,
    TrainerProtocol,
    check_contract,
)
from torchtitan_rl.config.generator import GeneratorConfig
from torchtitan_rl.config.trainer import TrainerConfig
from torchtitan_rl.core.plugins import check_arguments, resolve

GENERATORS = {
    "vllm": "torchtitan_rl.actors.generator:VLLMGenerator",
    "simulated": "torchtitan_rl.actors.simulated:SimulatedGenerator",
}
"""Import paths of the built-in generators."""
TRAINERS = {
    "torchtitan": "torchtitan_rl.actors.trainer:Trainer",
    "simulated": "torchtitan_rl.actors.simulated:SimulatedTrainer",
}
"""Import paths of the built-in trainers."""

GENERATOR_ARGUMENTS = ("model", "seed")
"""Keyword arguments that a run itself gives to a generator's class."""
TRAINER_ARGUMENTS = (
    *GENERATOR_ARGUMENTS,
    *("steps", "checkpoint_folder", "tokens_folder", "weights_folder", "keep", "async_mode"),
)
"""Keyword arguments that a run itself gives to a trainer's class."""
SPAWN_ARGUMENTS = (
    *("actor_class", "env", "placement", "distributed", "own_temporary_folder", "log_file"),
    *("self", "name", "Class", "pm"),
)
"""Arguments of `supervision.processes.spawn`, then of Monarch's: no keyword argument of these names
reaches an actor's class."""


def generator_class(config: GeneratorConfig) -> type[Any]:
    """The actor class that `generator.backend` names.

    Example:
        >>> generator_class(GeneratorConfig(backend="simulated")).__name__
        'SimulatedGenerator'
    """
    return _backend_class(config.backend, GENERATORS, what="generator.backend")


def trainer_class(config: TrainerConfig) -> type[Any]:
    """The actor class that `trainer.backend` names."""
    return _backend_class(config.backend, TRAINERS, what="trainer.backend")


def check_backends(
    generator: GeneratorConfig, trainer: TrainerConfig, *, colocated: bool = False
) -> None:
    """Refuse backends of the user's own that cannot be imported, lack an endpoint, or cannot be
    constructed with their keyword arguments, before any process starts."""
    if generator.backend not in GENERATORS:
        cls, what = generator_class(generator), f"generator.backend {generator.backend!r}"
        check_contract(cls, GeneratorProtocol, what=what)
        if colocated:
            check_contract(cls, ColocatedGeneratorProtocol, what=f"placement colocated: {what}")
        _check_kwargs("generator", generator, cls, GENERATOR_ARGUMENTS)
    if trainer.backend not in TRAINERS:
        cls, what = trainer_class(trainer), f"trainer.backend {trainer.backend!r}"
        check_contract(cls, TrainerProtocol, what=what)
        if colocated:
            check_contract(cls, ColocatedTrainerProtocol, what=f"placement colocated: {what}")
        _check_kwargs("trainer", trainer, cls, TRAINER_ARGUMENTS)


def _check_kwargs(
    who: str, config: GeneratorConfig | TrainerConfig, cls: type[Any], given: tuple[str, ...]
) -> None:
    """Refuse keyword arguments that the class does not take, or that it could never get."""
    what = f"{who}.backend"
    for name in config.kwargs:
        if name in given:
            raise ValueError(
                f"{what} {config.backend!r}: {who}.kwargs cannot set {name!r}, which every run "
                f"gives to its {who}; remove it from {who}.kwargs"
            )
        if name in SPAWN_ARGUMENTS:
            raise ValueError(
                f"{what} {config.backend!r}: {who}.kwargs cannot set {name!r}, a name that is "
                f"used to start the process; rename the argument of {cls.__name__}, for instance "
                f"to 'my_{name}'"
            )
    kwargs = {**dict.fromkeys(given, None), **config.kwargs}
    check_arguments(config.backend, cls, kwargs, what=what)


def _backend_class(name: str, paths: dict[str, str], *, what: str) -> type[Any]:
    builtins: dict[str, type[Any]] = {}
    return resolve(paths.get(name, name), builtins, what=what, kind="Class")
