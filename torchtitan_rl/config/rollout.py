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
    """Longest time of a conversation, in seconds; checked between turns, and a limit for tools."""
    timeout_seconds: float = 1200.0
    """Longest time of a group that runs ahead of its step, in seconds, grading included."""
    oversample: Fixed[int] = 0
    """Groups that a step runs in addition to those it needs; when it has enough, it cancels the
    slowest."""
    max_groups_per_step: Fixed[int] = 0
    """Dynamic sampling: sample groups until prompts_per_step of them have an advantage that is not
    0, at most this many. 0: off."""
    untrained_share: Fixed[float] = 0.0
    """Share of the rollouts, by the hash of their names, that is measured and never trained on."""
    thinking: Fixed[bool] = False
    """Let the model decide whether to think; otherwise its turn starts after an empty thought."""
    train_from: Fixed[str] = ""
    """Folder of a run: train on its saved rollouts, with their recorded rewards and advantages.
    Nothing is generated, graded or evaluated."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """The actor that runs a task's tools and answers; started only if a task has any."""
    grader: GraderConfig = field(default_factory=GraderConfig)
    """The actor that calls the task's reward function."""

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
