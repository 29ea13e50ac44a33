"""Rollouts: their limits, who answers and grades them, and which of them train."""

from dataclasses import dataclass, field

from torchtitan_rl.config.environment import EnvironmentConfig
from torchtitan_rl.config.grader import GraderConfig
from torchtitan_rl.config.renames import refuse_old_names
from torchtitan_rl.config.resume import Fixed


@refuse_old_names("rollout")
@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """Limits of one rollout, who answers and grades it, and which rollouts train. A rollout that
    reaches a limit ends with a status, and is graded."""

    max_turns: Fixed[int] = 8
    """Most turns of the model in one rollout."""
    max_tokens: Fixed[int] = 0
    """Most tokens of a conversation, prompt included; 0: generator.engine.max_model_len."""
    max_seconds: Fixed[float] = 600.0
    """Longest a conversation may last; checked between turns, and a tool gets no longer."""
    timeout_seconds: Fixed[float] = 1200.0
    """Longest a group may take, graded and all, where groups run ahead of their step."""
    oversample: Fixed[int] = 0
    """Groups a step runs beyond those it needs; the slowest are cancelled when it has enough."""
    max_groups_per_step: Fixed[int] = 0
    """Sample on until prompts_per_step groups have an advantage that is not 0, or so many were
    tried; 0: train on whatever comes."""
    untrained_share: Fixed[float] = 0.0
    """Share of the rollouts, by the hash of their names, that is measured and never trained on."""
    thinking: Fixed[bool] = False
    """Leave it to the model whether to think; else its turn starts after an empty thought."""
    train_from: Fixed[str] = ""
    """Folder of a run whose saved rollouts are trained on, as they were: nothing is generated,
    graded or evaluated."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Hosts a task's tools; spawned only when a task has any, or answers the model."""
    grader: GraderConfig = field(default_factory=GraderConfig)
    """Calls the task's reward function."""

    def __post_init__(self) -> None:
        if self.max_turns < 1 or self.max_tokens < 0 or not self.max_seconds > 0:
            raise ValueError(
                "rollout.max_turns must be at least 1, rollout.max_tokens 0 (as many as the model "
                "allows) or more, and rollout.max_seconds positive"
            )
        if not 0 <= self.untrained_share < 1:
            raise ValueError(
                f"rollout.untrained_share must be in [0, 1); got {self.untrained_share}"
            )
