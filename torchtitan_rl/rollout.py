"""Prompt groups, and what becomes of them: from scored samples to episodes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torchtitan_rl.algorithms.advantage import AdvantageConfig, group_advantages
from torchtitan_rl.tasks.task import Example
from torchtitan_rl.types import Episode, ScoredCompletion


@dataclass(slots=True)
class Group:
    """The samples of one prompt. Its id is unique in the run."""

    id: str
    example: Example
    prompt_token_ids: list[int]
    scored: list[ScoredCompletion] = field(default_factory=list)


def make_episodes(
    groups: Sequence[Group], advantage: AdvantageConfig, *, task: str, temperature: float
) -> list[Episode]:
    """What the trainer learns from; a group whose advantages are all 0 would teach nothing."""
    episodes = []
    for group in groups:
        advantages = group_advantages(advantage, group.scored, group.id)
        if not any(advantages):
            continue
        for scored, value in zip(group.scored, advantages, strict=True):
            completion = scored.completion
            episodes.append(
                Episode(
                    policy_version=completion.policy_version,
                    prompt_token_ids=completion.prompt_token_ids,
                    token_ids=completion.token_ids,
                    token_logprobs=completion.token_logprobs,
                    reward=scored.reward,
                    advantage=value,
                    task=task,
                    group_id=group.id,
                    temperature=temperature,
                    routed_experts=completion.routed_experts,
                )
            )
    return episodes


class UntrainableSteps:
    """A step without an episode is chance; many in a row are a mistake somewhere."""

    def __init__(self, most: int) -> None:
        self.most, self.in_a_row = most, 0

    def count(self, groups: Sequence[Group], episodes: Sequence[Episode]) -> None:
        """Count a step; raise when too many in a row had nothing to learn from."""
        self.in_a_row = 0 if episodes else self.in_a_row + 1
        if self.in_a_row < self.most:
            return
        rewards = sorted({sample.reward for group in groups for sample in group.scored})
        raise RuntimeError(
            f"{self.in_a_row} steps in a row had nothing to learn from: every advantage was 0, or "
            f"every episode too long (rewards seen: {rewards[:5]}). Look at the prompts, the "
            "reward function, generator.sampling.max_tokens and the overlong/ counts in the metrics"
        )
