"""What a reward function must return: one reward for each sample of its group."""

import math
from collections.abc import Callable
from typing import Any

from torchtitan_rl.core.errors import TorchtitanRLError, defined_at
from torchtitan_rl.tasks.task import Reward


class RewardError(TorchtitanRLError, RuntimeError):
    """A reward function failed; the message names the task and the group."""


def check_rewards(
    rewards: Any, count: int, whose: str, function: Callable[..., Any]
) -> list[Reward]:
    """What the reward function returned for `count` samples; if something is wrong with it, the
    error begins with `whose` reward function it is and ends with where that is."""
    where = f" ({defined_at(function)})" if defined_at(function) else ""
    try:
        rewards = list(rewards)
    except TypeError:
        raise RewardError(
            f"{whose} returned {rewards!r}; expected a list of rewards, one for each "
            f"completion{where}"
        ) from None
    if len(rewards) != count:
        raise RewardError(f"{whose} returned {len(rewards)} rewards for {count} completions{where}")
    checked = []
    for index, reward in enumerate(rewards):
        if isinstance(reward, bool | int | float):
            reward = Reward(float(reward), correct=reward >= 1.0)
        numbers = [reward.value, *reward.parts.values()] if isinstance(reward, Reward) else [None]
        if not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers):
            raise RewardError(
                f"{whose} returned {reward!r} for completion {index}; expected a finite "
                f"number{where}"
            )
        checked.append(reward)
    return checked
