"""Is it chance, or is something broken? One failure is chance; many in a row are a mistake."""

from collections import defaultdict
from collections.abc import Sequence

from torchtitan_rl.core.types import Episode, Rollout
from torchtitan_rl.observability.console import console
from torchtitan_rl.rollout.loop import Group

MOST_FAILED_ROLLOUTS = 16
"""Rollouts of a task that its environment may fail in a row."""


class Health:
    """Watches the steps of a run; warns at first, and raises when there is no hope.

    Example:
        health = Health(most_untrainable_steps=20)
        health.check_rollouts(groups)
        health.check_episodes(groups, episodes)
    """

    def __init__(self, most_untrainable_steps: int) -> None:
        self._most, self._untrainable = most_untrainable_steps, 0
        self._failed: defaultdict[str, int] = defaultdict(int)

    def check_rollouts(self, groups: Sequence[Group]) -> None:
        """Say why rollouts ended because their task failed; a task that does nothing else is
        broken."""
        rollouts: defaultdict[str, list[Rollout]] = defaultdict(list)
        for group in groups:
            rollouts[group.task.name] += [c.rollout for c in group.conversations]
        for task, its in rollouts.items():
            failed = [r for r in its if r.status == "environment_failed"]
            self._failed[task] = self._failed[task] + len(its) if failed == its else 0
            if self._failed[task] >= MOST_FAILED_ROLLOUTS:
                raise RuntimeError(f"all rollouts of task {task!r} failed: {failed[0].failure}")
            if failed:
                count = f"{len(failed)} of {len(its)} rollouts of task {task!r}"
                console.print(f"warning: {count} failed: {failed[0].failure}", markup=False)

    def check_episodes(self, groups: Sequence[Group], episodes: Sequence[Episode]) -> None:
        """Count steps in a row that had nothing to learn from."""
        self._untrainable = 0 if episodes else self._untrainable + 1
        if not self._untrainable:
            return
        rewards = sorted({sample.reward for group in groups for sample in group.scored})
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
