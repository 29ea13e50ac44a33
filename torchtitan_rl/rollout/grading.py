"""From rollouts to scored rollouts: the task's reward function, a prompt group per call."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from torchtitan_rl.actors.grader import pair
from torchtitan_rl.actors.interfaces import GroupRewards, RewardError, UngradedGroup
from torchtitan_rl.core.types import Rollout, Status, Turn
from torchtitan_rl.rollout.groups import RolloutGroup, ScoredGroup

RewardsCall = Callable[[list[UngradedGroup]], Awaitable[Sequence[GroupRewards]]]
"""Asks the grader for the rewards of each group, or why it has none: `Graders.rewards`."""


async def grade(groups: Sequence[RolloutGroup], rewards: RewardsCall) -> list[ScoredGroup]:
    """The groups with the rewards of all rollouts that came to an end.

    A group whose reward function failed is lost; if that is all of them, it is no accident, and its
    error is raised.
    """
    gradable = [group for group in groups if group.ended]
    if not gradable:
        raise RuntimeError(groups[0].lost[0].failure)
    asked = time.monotonic()
    given = await rewards([_ungraded(group) for group in gradable])
    seconds = time.monotonic() - asked
    by_group = dict(zip((group.prompt.id for group in gradable), given, strict=True))
    graded = [_scored(group, by_group.get(group.prompt.id, []), seconds) for group in groups]
    if not any(group.scored for group in graded):
        raise next(error for error in given if isinstance(error, RewardError))
    return graded


def _ungraded(group: RolloutGroup) -> UngradedGroup:
    """The group as the grader gets it."""
    rollouts = [_without_attributions(rollout) for rollout in group.ended]
    prompt = group.prompt
    return UngradedGroup(rollouts, prompt.example.expected_answer, prompt.id, prompt.task.name)


def _without_attributions(rollout: Rollout) -> Rollout:
    """The rollout as reward functions see it: who said what is in its messages, and token by token
    it would be most of what the grader is sent."""
    return replace(rollout, turns=[Turn(completion) for completion in rollout.completions])


def _scored(group: RolloutGroup, rewards: GroupRewards, seconds: float) -> ScoredGroup:
    if isinstance(rewards, RewardError):
        group, rewards = group.failed(Status.FAILED, str(rewards)), []
    waited = [_add_wait_time(rollout, seconds) for rollout in group.ended]
    return ScoredGroup(group.prompt, tuple(pair(waited, rewards)), tuple(group.lost))


def _add_wait_time(rollout: Rollout, seconds: float) -> Rollout:
    return replace(rollout, seconds={**rollout.seconds, "grade": seconds})
