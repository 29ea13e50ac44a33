"""Whether failures are chance, or something is broken: one is chance, many in a row are not."""

from collections import defaultdict
from collections.abc import Sequence

from torchtitan_rl.core.types import Episode, Status
from torchtitan_rl.observability.console import console
from torchtitan_rl.rollout.record import RolloutRecord

MOST_FAILED_ROLLOUTS = 16
"""Rollouts of a task that its environment may fail in a row."""


class ProgressGuard:
    """Watches the steps of a run; warns at first, and raises when there is no hope.

    Example:
        guard = ProgressGuard(most_untrainable_steps=20)
        guard.check_rollouts(records)
        guard.check_episodes(records, episodes)
    """

    def __init__(self, most_untrainable_steps: int) -> None:
        self._most, self._untrainable = most_untrainable_steps, 0
        self._failed: defaultdict[str, int] = defaultdict(int)

    def check_rollouts(self, records: Sequence[RolloutRecord]) -> None:
        """Warn of rollouts that ended because their task failed; a task that does nothing else is
        broken."""
        rollouts: defaultdict[str, list[RolloutRecord]] = defaultdict(list)
        for record in records:
            if record.split != "discarded":
                rollouts[record.task].append(record)
        for task, its in rollouts.items():
            failed = [r for r in its if r.status == Status.ENVIRONMENT_FAILED]
            self._failed[task] = self._failed[task] + len(its) if len(failed) == len(its) else 0
            if self._failed[task] >= MOST_FAILED_ROLLOUTS:
                raise RuntimeError(f"all rollouts of task {task!r} failed: {failed[0].failure}")
            if failed:
                count = f"{len(failed)} of {len(its)} rollouts of task {task!r}"
                console.print(f"warning: {count} failed: {failed[0].failure}", markup=False)

    def check_episodes(self, records: Sequence[RolloutRecord], episodes: Sequence[Episode]) -> None:
        """Count steps in a row that had nothing to learn from. A KL term does not count: it only
        holds the policy where it is."""
        learns = any(episode.advantage or episode.echoes for episode in episodes)
        self._untrainable = 0 if learns else self._untrainable + 1
        if not self._untrainable:
            return
        rewards = sorted({r.reward for r in records if r.reward is not None})
        said = (
            "nothing to learn from: every advantage was 0, or every episode too long or filtered "
            f"(rewards seen: {rewards[:5]})"
        )
        if self._untrainable < self._most:
            console.print(f"warning: this step had {said}", markup=False)
            return
        raise RuntimeError(
            f"{self._untrainable} steps in a row had {said}. Look at the prompts, the reward "
            "function, generator.sampling.max_tokens, trainer.batch_filter and the overlong/ "
            "counts in the metrics"
        )
