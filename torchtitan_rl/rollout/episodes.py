"""What the trainer learns from a step's rollouts. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl.algorithms.advantage import group_advantages
from torchtitan_rl.algorithms.echo import call_filter
from torchtitan_rl.config.advantage import AdvantageConfig
from torchtitan_rl.config.echo import EchoConfig
from torchtitan_rl.core.types import Episode, Rollout
from torchtitan_rl.rollout.loop import Group
from torchtitan_rl.rollout.sequences import NOBODY, TokenSequence, Turn, merge_turns, turn_alphas
from torchtitan_rl.tasks.task import is_heldout


@dataclass(slots=True)
class Batch:
    """The episodes of a step."""

    episodes: list[Episode] = field(default_factory=list)
    heldout: list[Episode] = field(default_factory=list)
    """Of rollouts that are measured and never trained on."""
    unattributed: int = 0
    """Turns that do not echo, because the renderer could not say where their tokens come from."""


def make_batch(
    groups: Sequence[Group], advantage: AdvantageConfig, *, untrained_share: float = 0.0
) -> Batch:
    """Episodes of the groups' conversations. A group whose advantages are all 0 teaches nothing by
    RL: only those of its tokens that echo are kept."""
    batch = Batch()
    for group in groups:
        if not group.scored:
            continue  # none of its rollouts came to anything
        if not group.recorded:
            batch.unattributed += judge(group, advantage, untrained_share=untrained_share)
        rl = any(group.advantages)
        for conversation, scored, value in zip(
            group.conversations, group.scored, group.advantages, strict=True
        ):
            into = batch.heldout if conversation.heldout else batch.episodes
            into += to_episodes(
                conversation.samples or [],
                name=f"{group.id}/{conversation.number}",
                rl=rl,
                policy_version=conversation.rollout.policy_version,
                reward=scored.reward,
                advantage=value,
                task=group.task.name,
                group_id=group.id,
                temperature=group.sampling.temperature,
            )
    _level(batch.episodes + batch.heldout)
    return batch


def judge(group: Group, advantage: AdvantageConfig, *, untrained_share: float) -> int:
    """Give the group its advantages, and its conversations their sequences; say which are held out.

    Returns how many turns could not be attributed. The rollout log keeps all of this, so that a
    batch can be made of it again.
    """
    group.advantages = group_advantages(advantage, group.scored, group.id)
    unattributed = 0
    for conversation in group.conversations:
        conversation.samples, unknown = echoing_sequences(
            group.task.config.echo, conversation.turns, conversation.rollout
        )
        unattributed += unknown
        conversation.heldout = is_heldout(f"{group.id}/{conversation.number}", untrained_share)
    return unattributed


def echoing_sequences(
    echo: EchoConfig | None, turns: Sequence[Turn], rollout: Rollout
) -> tuple[list[TokenSequence], int]:
    """The sequences of a conversation with their echo weights, and how many of its turns could not
    be attributed."""
    if echo is None:
        return merge_turns(turns), 0
    allowed = call_filter(echo, rollout) if echo.filter and turns else None
    alphas, unattributed = turn_alphas(echo, turns, allowed)
    return merge_turns(turns, alphas), unattributed


def to_episodes(
    sequences: Sequence[TokenSequence], *, rl: bool, name: str = "", **of_all: Any
) -> list[Episode]:
    """An episode for each sequence that teaches something; without `rl`, only where it echoes.

    `name` is of the rollout; `of_all` are the fields that they share: task, advantage and so on.
    """
    episodes = []
    for number, sequence in enumerate(sequences):
        prompt = sequence.prompt_length
        echoes = sequence.alphas.count(None) < len(sequence.alphas)
        if not rl and not echoes:
            continue
        logprobs = sequence.logprobs[prompt:]
        recorded = not all(map(math.isnan, logprobs))
        sampled = sequence.versions.count(NOBODY) < len(sequence.versions)
        episodes.append(
            Episode(
                name=f"{name}/{number}",
                prompt_token_ids=sequence.ids[:prompt],
                token_ids=sequence.ids[prompt:],
                token_logprobs=logprobs if recorded else None,
                token_versions=sequence.versions[prompt:] if sampled else None,
                routed_experts=sequence.routed_experts,
                echo_alpha=_gapped(sequence.alphas) if echoes else None,
                loss_mask=sequence.sampled if rl else [False] * len(sequence.ids),
                **of_all,
            )
        )
    return episodes


def _gapped(alphas: Sequence[float | None]) -> list[float]:
    return [math.nan if alpha is None else alpha for alpha in alphas]


def _level(episodes: Sequence[Episode]) -> None:
    """A field is had by all episodes of a batch or by none: those that do not echo say so."""
    if any(episode.echo_alpha is not None for episode in episodes):
        for episode in episodes:
            if episode.echo_alpha is None:
                episode.echo_alpha = [math.nan] * episode.length
