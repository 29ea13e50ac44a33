"""The samples of one prompt, stage by stage. Plain values: no stage changes what it was given.

    PromptGroup ──roll out──► RolloutGroup ──grade──► ScoredGroup ──annotate──► RolloutRecords

Every rollout that a PromptGroup asks for is in the RolloutGroup once, with how it ended; and in the
ScoredGroup once, scored or lost.
"""

from dataclasses import dataclass, replace

from torchtitan_rl.config.sampling import SamplingConfig
from torchtitan_rl.core.types import Rollout, ScoredCompletion, Status
from torchtitan_rl.rollout.sequences import Rendered
from torchtitan_rl.tasks.task import Example, Task


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """A prompt to roll out `sampling.n` times."""

    id: str
    """Unique in the run."""
    task: Task
    example: Example
    sampling: SamplingConfig
    shown: Rendered
    """The prompt in tokens."""


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All rollouts of a prompt, by their number in the group; each says how it ended."""

    prompt: PromptGroup
    rollouts: tuple[Rollout, ...]

    @property
    def ended(self) -> list[Rollout]:
        """The rollouts that came to an end, to be graded."""
        return [rollout for rollout in self.rollouts if rollout.status.ended]

    @property
    def lost(self) -> list[Rollout]:
        """The rollouts that are not graded: failed, timed out, empty or cancelled."""
        return [rollout for rollout in self.rollouts if not rollout.status.ended]

    def whole(self) -> "RolloutGroup":
        """The group as its task can score it: if that needs all samples, and one was lost, none is
        left."""
        if not (self.lost and self.ended and self.prompt.task.group_scoring):
            return self
        why = self.lost[0].failure
        return self.failed(Status.FAILED, f"another sample of its group failed: {why}")

    def failed(self, status: Status, reason: str) -> "RolloutGroup":
        """The group with nothing to grade; a rollout that was lost before keeps its reason."""
        return replace(
            self,
            rollouts=tuple(
                rollout.failed(status, reason) if rollout.status.ended else rollout
                for rollout in self.rollouts
            ),
        )


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The graded rollouts of a prompt, and the lost ones."""

    prompt: PromptGroup
    scored: tuple[ScoredCompletion, ...]
    """The graded rollouts; each ScoredCompletion holds its Rollout."""
    lost: tuple[Rollout, ...]
