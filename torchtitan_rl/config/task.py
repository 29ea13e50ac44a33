"""The settings that every task has."""

from dataclasses import dataclass, replace
from typing import Self

from torchtitan_rl.config.echo import EchoConfig
from torchtitan_rl.config.sampling import SamplingConfig
from torchtitan_rl.core.configurable import Configurable


@dataclass(kw_only=True, slots=True)
class TaskConfig(Configurable.Config):
    """The settings that every task has; `Task.Config` builds on it."""

    name: str = "task"
    """The task's name in metrics, logs and errors."""
    sampling: SamplingConfig | None = None
    """How this task's completions are sampled; None: as generator.sampling says."""
    echo: EchoConfig | None = None
    """Which tokens of the task's rollouts also train by cross-entropy; None: none."""
    show_tools: bool = True
    """Describe the task's tools in the prompt; a model that was taught them needs no
    description."""

    def parts(self) -> "tuple[TaskConfig, ...]":
        """Configs of the tasks that this one is made of: itself, unless it is a mixture."""
        return (self,)

    def without_echo(self) -> Self:
        """A copy in which nothing echoes."""
        return replace(self, echo=None)
