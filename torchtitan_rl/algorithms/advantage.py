"""Advantages: functions from the samples of one prompt group to one float per sample."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchtitan_rl.config.advantage import AdvantageConfig
from torchtitan_rl.core.errors import defined_at, describe_error
from torchtitan_rl.core.plugins import check_arguments, resolve
from torchtitan_rl.core.types import Completion, ScoredCompletion

AdvantageFn = Callable[..., list[float]]


def mean_baseline(group: Sequence[ScoredCompletion]) -> list[float]:
    """Advantage r - mean(r), as in Dr.GRPO: dividing by the spread would favour prompts that are
    too easy or too hard."""
    rewards = _rewards(group)
    return (rewards - _mean(rewards)).tolist()


def grpo(group: Sequence[ScoredCompletion]) -> list[float]:
    """Advantage (r - mean) / (std + 1e-6), std of the sample; 0 for a group of one."""
    rewards = _rewards(group)
    if len(rewards) == 1:
        return [0.0]
    return ((rewards - _mean(rewards)) / (rewards.std() + 1e-6)).tolist()


def rloo(group: Sequence[ScoredCompletion]) -> list[float]:
    """Advantage over the mean of the other samples: (r - mean) n / (n - 1); 0 for a group of
    one."""
    rewards = _rewards(group)
    n = len(rewards)
    if n == 1:
        return [0.0]
    return ((rewards - _mean(rewards)) * n / (n - 1)).tolist()


def maxrl(group: Sequence[ScoredCompletion]) -> list[float]:
    """Advantage (r - mean) / mean: the rarer success is, the more it counts. All 0 when the mean is
    not positive."""
    rewards = _rewards(group)
    mean = _mean(rewards)
    if mean <= 0:
        return [0.0] * len(rewards)
    return ((rewards - mean) / mean).tolist()


def reward(group: Sequence[ScoredCompletion]) -> list[float]:
    """Advantage r: the reward without a baseline."""
    return _rewards(group).tolist()


def length_penalty(group: Sequence[ScoredCompletion]) -> list[ScoredCompletion]:
    """The group with rewards that favour the shorter of its best answers, before any baseline.

    The best get r·(1 + bonus), bonus = 1 - length / mean length of the best, between 0 and 1; the
    others, and a group without a positive reward, keep theirs.

    Example:
        Right in 10 and in 30 tokens, reward 1 each: 1.5 and 1.
    """
    best = max(scored.reward for scored in group)
    lengths = [len(s.completion.token_ids) for s in group if s.reward >= best]
    mean = sum(lengths) / len(lengths)
    if best <= 0 or mean <= 0:
        return list(group)

    def preferred(scored: ScoredCompletion) -> ScoredCompletion:
        bonus = min(max(1 - len(scored.completion.token_ids) / mean, 0.0), 1.0)
        return replace(scored, reward=scored.reward * (1 + bonus * (scored.reward >= best)))

    return [preferred(scored) for scored in group]


def _mean(rewards: torch.Tensor) -> torch.Tensor:
    # Exact for equal rewards: their advantages must be 0 and not 1e-17, for the group to be
    # left out.
    return rewards[0] + (rewards - rewards[0]).mean()


def _rewards(group: Sequence[ScoredCompletion]) -> torch.Tensor:
    return torch.tensor([scored.reward for scored in group], dtype=torch.float64)


ADVANTAGES: dict[str, AdvantageFn] = {
    "mean_baseline": mean_baseline,
    "grpo": grpo,
    "rloo": rloo,
    "maxrl": maxrl,
    "reward": reward,
}


def group_advantages(
    config: AdvantageConfig, group: Sequence[ScoredCompletion], group_id: str
) -> list[float]:
    """Call the configured function on one group and check what it returns.

    Example:
        >>> group_advantages(AdvantageConfig(), [], "step 0, prompt 0")
        Traceback (most recent call last):
        ...
        ValueError: group step 0, prompt 0 is empty: a group has at least one completion
    """
    if not group:
        raise ValueError(f"group {group_id} is empty: a group has at least one completion")
    function = resolve(config.name, ADVANTAGES, what="advantage")
    rewarded = length_penalty(group) if config.length_penalty else group
    try:
        advantages = function(rewarded, **config.kwargs)
    except Exception as error:
        said = describe_error(error, config.name.partition(":")[0])
        raise ValueError(
            f"advantage function {config.name!r} failed for group {group_id}: {said}"
        ) from error
    _check_advantages(advantages, config.name, function, len(group), group_id)
    return [float(value) for value in advantages]


def _check_advantages(
    advantages: Any, name: str, function: AdvantageFn, count: int, group_id: str
) -> None:
    who, where = f"advantage function {name!r} returned", f"({defined_at(function)})"
    if not hasattr(advantages, "__len__"):
        raise ValueError(
            f"{who} {advantages!r} for group {group_id}; expected a list of numbers {where}"
        )
    if len(advantages) != count:
        raise ValueError(
            f"{who} {len(advantages)} values for group {group_id}, which has {count} completions "
            f"{where}"
        )
    for index, value in enumerate(advantages):
        if not hasattr(value, "__float__") or not math.isfinite(value):
            raise ValueError(
                f"{who} {value!r} for completion {index} of group {group_id}; every advantage "
                f"must be a finite number {where}"
            )


def check_advantage(config: AdvantageConfig) -> None:
    """Refuse an advantage function of the user's own that cannot be imported, called with the
    configured keyword arguments, or used: it is tried on a group of two."""
    if config.name in ADVANTAGES:
        return
    function = resolve(config.name, ADVANTAGES, what="advantage")
    check_arguments(config.name, function, config.kwargs, what="advantage")
    group_advantages(config, _trial_group(), "on trial")


def _trial_group() -> list[ScoredCompletion]:
    """Two completions, one right and one wrong, on which a function of the user's is tried."""

    def scored(reward: float) -> ScoredCompletion:
        completion = Completion(
            policy_version=0,
            prompt_idx=0,
            prompt_token_ids=[0],
            text="",
            token_ids=[0],
            token_logprobs=[-1.0],
            finish_reason="stop",
        )
        return ScoredCompletion(completion, reward, correct=reward > 0)

    return [scored(1.0), scored(0.0)]
