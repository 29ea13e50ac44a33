"""From scored groups to records, and from records to the episodes that the trainer learns from.

Pure functions: what a step trains on depends on nothing else, so that records which another run has
saved make the same episodes.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl.algorithms.advantage import group_advantages
from torchtitan_rl.algorithms.echo import call_filter
from torchtitan_rl.config.advantage import AdvantageConfig
from torchtitan_rl.config.echo import EchoConfig
from torchtitan_rl.core.types import Episode, Rollout, ScoredCompletion, Turn
from torchtitan_rl.rollout.groups import ScoredGroup
from torchtitan_rl.rollout.record import RolloutRecord, lost_records, rollout_of
from torchtitan_rl.rollout.sequences import TokenSequence, merge_turns, turn_alphas
from torchtitan_rl.tasks.task import in_share


def annotate(
    group: ScoredGroup, advantage: AdvantageConfig, *, untrained_share: float = 0.0
) -> list[RolloutRecord]:
    """The records of a group: each scored rollout with its advantage, its sequences to train on
    with their echo weights, and whether it is in the untrained share; then those that were lost."""
    if not group.scored:
        return lost_records(group.prompt, group.lost)
    prompt, records = group.prompt, []
    advantages = group_advantages(advantage, group.scored, prompt.id)
    for scored, value in zip(group.scored, advantages, strict=True):
        rollout = rollout_of(scored)
        sequences, unattributed = echoing_sequences(prompt.task.config.echo, rollout)
        measured = in_share(f"{prompt.id}/{rollout.sample}", untrained_share)
        records.append(
            RolloutRecord.of(
                prompt,
                rollout,
                split="untrained" if measured else "train",
                scored=scored,
                advantage=value,
                sequences=sequences,
                unattributed=unattributed,
            )
        )
    return records + lost_records(prompt, group.lost)


def has_signal(records: Iterable[RolloutRecord]) -> bool:
    """Whether a group has anything for the policy loss: an advantage that is not 0."""
    return any(record.advantage for record in records)


@dataclass(slots=True)
class Batch:
    """The episodes of a step."""

    episodes: list[Episode] = field(default_factory=list)
    untrained: list[Episode] = field(default_factory=list)
    """Episodes of rollouts that are measured and never trained on."""
    unattributed: int = 0
    """Turns that do not echo, because the renderer could not say where their tokens come from."""


def make_batch(records: Sequence[RolloutRecord], *, keep_zero_advantages: bool = False) -> Batch:
    """The episodes of a step's records. A group whose advantages are all 0 has no signal for the
    policy loss: only those of its tokens that echo are kept, unless `keep_zero_advantages`, for KL
    terms, which train every token that was sampled."""
    groups: defaultdict[str, list[RolloutRecord]] = defaultdict(list)
    for record in records:
        if record.split in ("train", "untrained"):
            groups[record.group].append(record)
    batch = Batch(unattributed=sum(r.unattributed for its in groups.values() for r in its))
    for its in groups.values():
        rl = keep_zero_advantages or has_signal(its)
        for record in its:
            into = batch.untrained if record.split == "untrained" else batch.episodes
            into += to_episodes(
                record.sequences,
                name=f"{record.group}/{record.sample}",
                rl=rl,
                policy_version=record.policy_version,
                reward=record.reward,
                advantage=record.advantage,
                task=record.task,
                group_id=record.group,
                temperature=record.temperature,
            )
    return _level(batch)


def make_episodes(
    groups: Iterable[Sequence[ScoredCompletion]],
    advantage: AdvantageConfig | None = None,
    *,
    task: str = "task",
    name: str = "group",
    temperature: float = 1.0,
) -> list[Episode]:
    """The episodes of scored groups, one group for each prompt: for scripts and notebooks that have
    no run. As in a run, a group whose advantages are all 0 is left out.

    `temperature` is the one that was sampled with; groups get the ids `<name> 0`, `<name> 1`, ...

    Example:
        Rewards 1 and 0 of one prompt, 0 and 0 of another: two episodes of "group 0", with the
        advantages 0.5 and -0.5.
    """
    episodes: list[Episode] = []
    for number, group in enumerate(groups):
        group_id = f"{name} {number}"
        advantages = group_advantages(advantage or AdvantageConfig(), group, group_id)
        if not any(advantages):
            continue
        for sample, (scored, value) in enumerate(zip(group, advantages, strict=True)):
            said = scored.completion
            episodes += to_episodes(
                merge_turns(said.turns if isinstance(said, Rollout) else [Turn(said)]),
                rl=True,
                name=f"{group_id}/{sample}",
                policy_version=said.policy_version,
                reward=scored.reward,
                advantage=value,
                task=task,
                group_id=group_id,
                temperature=temperature,
            )
    return episodes


def echoing_sequences(echo: EchoConfig | None, rollout: Rollout) -> tuple[list[TokenSequence], int]:
    """The sequences of a rollout with their echo weights, and how many of its turns could not be
    attributed."""
    turns = rollout.turns
    if echo is None:
        return merge_turns(turns), 0
    allowed = call_filter(echo, rollout) if echo.filter and turns else None
    alphas, unattributed = turn_alphas(echo, turns, allowed)
    return merge_turns(turns, alphas), unattributed


def to_episodes(
    sequences: Sequence[TokenSequence], *, rl: bool, name: str = "", **shared: Any
) -> list[Episode]:
    """An episode for each sequence that there is something to learn from; without `rl`, only where
    it echoes.

    `name` is that of the rollout; `shared` are fields that all of them have: task, advantage and so
    on.
    """
    return [
        Episode(
            prompt_token_ids=sequence.prompt_token_ids,
            token_ids=sequence.token_ids,
            name=f"{name}/{number}",
            columns=sequence.columns if rl else _without_rl(sequence),
            **shared,
        )
        for number, sequence in enumerate(sequences)
        if rl or sequence.echoes
    ]


def _without_rl(sequence: TokenSequence) -> dict[str, Any]:
    return {**sequence.columns, "loss_mask": [False] * sequence.length}


def _level(batch: Batch) -> Batch:
    """A column is had by all episodes of a batch or by none: those that do not echo say so."""
    if all(episode.echo_alpha is None for episode in batch.episodes + batch.untrained):
        return batch

    def level(episodes: list[Episode]) -> list[Episode]:
        return [
            episode.with_columns(echo_alpha=[math.nan] * episode.length)
            if episode.echo_alpha is None
            else episode
            for episode in episodes
        ]

    return Batch(level(batch.episodes), level(batch.untrained), batch.unattributed)
