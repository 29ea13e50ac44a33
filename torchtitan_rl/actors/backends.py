"""Classes of the generator and trainer backends, imported only when they are looked up."""

from typing import Any

from torchtitan_rl.actors.interfaces import GeneratorProtocol, TrainerProtocol, check_contract
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


def check_backends(generator: GeneratorConfig, trainer: TrainerConfig) -> None:
    """Refuse backends of the user's own that cannot be imported, lack an endpoint, or cannot be
    constructed with their keyword arguments, before any process starts."""
    runtime = dict.fromkeys(("model", "seed"), None)
    if generator.backend not in GENERATORS:
        kwargs, cls = {**runtime, **generator.kwargs}, generator_class(generator)
        check_contract(cls, GeneratorProtocol, what=f"generator.backend {generator.backend!r}")
        check_arguments(generator.backend, cls, kwargs, what="generator.backend")
    runtime |= dict.fromkeys(
        ("steps", "checkpoint_folder", "tokens_folder", "weights_folder", "keep"), None
    )
    if trainer.backend not in TRAINERS:
        kwargs, cls = {**runtime, **trainer.kwargs}, trainer_class(trainer)
        check_contract(cls, TrainerProtocol, what=f"trainer.backend {trainer.backend!r}")
        check_arguments(trainer.backend, cls, kwargs, what="trainer.backend")


def _backend_class(name: str, paths: dict[str, str], *, what: str) -> type[Any]:
    builtins: dict[str, type[Any]] = {}
    return resolve(paths.get(name, name), builtins, what=what, kind="Class")
