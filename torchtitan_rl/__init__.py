"""Narrow actors for reinforcement learning of language models, PyTorch-native from end to end.

torchtitan trains, vLLM generates, Monarch connects the processes. A run is one `Controller`; start
reading at `run/controller.py`. The names below are imported when they are first used: `import
torchtitan_rl` imports neither torch nor any other of these libraries.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_rl.algorithms.policy_loss import LossInputs, LossOutput
    from torchtitan_rl.config.generator import GeneratorConfig
    from torchtitan_rl.config.run import RunConfig
    from torchtitan_rl.config.sampling import SamplingConfig
    from torchtitan_rl.config.trainer import TrainerConfig
    from torchtitan_rl.core.errors import TorchtitanRLError
    from torchtitan_rl.core.types import Completion, Episode, Rollout, ScoredCompletion
    from torchtitan_rl.rollout.episodes import make_episodes
    from torchtitan_rl.run.controller import Controller
    from torchtitan_rl.supervision.spawn import (
        spawn_environment,
        spawn_generator,
        spawn_grader,
        spawn_reference,
        spawn_trainer,
    )
    from torchtitan_rl.tasks.task import Example, Reward, Task
    from torchtitan_rl.tasks.tools.tool import ArgumentsError, tool

__version__ = "0.1.0"

__all__ = [
    "ArgumentsError",
    "Completion",
    "Controller",
    "Episode",
    "Example",
    "GeneratorConfig",
    "LossInputs",
    "LossOutput",
    "Reward",
    "Rollout",
    "RunConfig",
    "SamplingConfig",
    "ScoredCompletion",
    "Task",
    "TorchtitanRLError",
    "TrainerConfig",
    "make_episodes",
    "spawn_environment",
    "spawn_generator",
    "spawn_grader",
    "spawn_reference",
    "spawn_trainer",
    "tool",
]

_HOMES = {
    "ArgumentsError": "tasks.tools.tool",
    "Completion": "core.types",
    "Controller": "run.controller",
    "Episode": "core.types",
    "Example": "tasks.task",
    "GeneratorConfig": "config.generator",
    "LossInputs": "algorithms.policy_loss",
    "LossOutput": "algorithms.policy_loss",
    "Reward": "tasks.task",
    "Rollout": "core.types",
    "RunConfig": "config.run",
    "SamplingConfig": "config.sampling",
    "ScoredCompletion": "core.types",
    "Task": "tasks.task",
    "TorchtitanRLError": "core.errors",
    "TrainerConfig": "config.trainer",
    "make_episodes": "rollout.episodes",
    "spawn_environment": "supervision.spawn",
    "spawn_generator": "supervision.spawn",
    "spawn_grader": "supervision.spawn",
    "spawn_reference": "supervision.spawn",
    "spawn_trainer": "supervision.spawn",
    "tool": "tasks.tools.tool",
}
"""The module of each public name."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
