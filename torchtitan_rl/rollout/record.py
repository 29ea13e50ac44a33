"""A rollout as an object of the rollout log, and its sequences back again.

What a sequence trains is kept in full, so that a batch can be made of the log: see dump.py.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from torchtitan_rl.core.types import Rollout, ScoredCompletion
from torchtitan_rl.rollout.sequences import NOBODY, TokenSequence, merge_turns

if TYPE_CHECKING:
    from torchtitan_rl.rollout.loop import Conversation, Group

SCHEMA = 1
"""Of the records; goes up when a reader of older ones would misunderstand them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A rollout to be written: references to what changes no more, so that a thread can do it."""

    group: "Group"
    sample: int
    """Its number in the group."""
    split: str
    conversation: "Conversation | None" = None
    """None: its group ended before it began."""
    scored: ScoredCompletion | None = None
    advantage: float | None = None
    failed: tuple[str, str] | None = None
    """Kind and reason."""


def entries(group: "Group", split: str) -> Iterator[Entry]:
    """Every rollout of a group, exactly once: those that train, or are evaluated, then the rest."""
    rewards = {id(scored.completion): scored for scored in group.scored}
    advantages: Sequence[float | None] = group.advantages or [None] * len(group.conversations)
    for conversation, advantage in zip(group.conversations, advantages, strict=True):
        scored = rewards.get(id(conversation.rollout))
        where = "held out" if conversation.heldout else split
        yield Entry(group, conversation.number, where, conversation, scored, advantage)
    for conversation in group.buried:
        scored, failed = rewards.get(id(conversation.rollout)), conversation.failed
        yield Entry(group, conversation.number, "dropped", conversation, scored, None, failed)
    begun = {c.number for c in chain(group.conversations, group.buried)}
    for number in range(group.sampling.n):
        if number not in begun and group.failures:
            last = group.failures[-1]
            yield Entry(group, number, "dropped", failed=(last.kind, last.reason))


def rollout_record(entry: Entry, step: int) -> dict[str, Any]:
    """What the log says of a rollout."""
    group, conversation, scored = entry.group, entry.conversation, entry.scored
    rollout = (
        conversation.rollout if conversation else Rollout([], group.example.messages, "finished")
    )
    kind, reason = entry.failed or ("", "")
    return {
        "schema": SCHEMA,
        "step": step,
        "split": entry.split,
        "task": group.task.name,
        "group": group.id,
        "sample": entry.sample,
        "reward": scored.reward if scored else None,
        "correct": scored.correct if scored else None,
        "reward_parts": scored.reward_parts if scored else {},
        "advantage": entry.advantage,
        # One that was not useful has ended like any other.
        "status": rollout.status if kind in ("", "dropped") else kind,
        "failure": reason or rollout.failure,
        "turns": len(rollout.completions),
        "tokens": len(rollout.token_ids),
        "tool_calls": rollout.outcomes,
        **_versions(rollout),
        "temperature": group.sampling.temperature,
        "seconds": conversation.seconds if conversation else {},
        "messages": rollout.messages,
        "expected_answer": group.example.expected_answer,
        "state": {column: rollout.state.get(column) for column in group.task.state_columns},
        "sequences": [sequence_record(sample) for sample in _samples(conversation)],
    }


def _samples(conversation: "Conversation | None") -> list[TokenSequence]:
    if conversation is None:
        return []
    if conversation.samples is None:  # nobody has asked what it teaches
        return merge_turns(conversation.turns)
    return conversation.samples


def _versions(rollout: Rollout) -> dict[str, int | None]:
    """The oldest and the newest weights that sampled any of its tokens."""
    known = [
        version
        for completion in rollout.completions
        for version in (completion.policy_version, *(completion.token_versions or ()))
    ]
    return {
        "policy_version": min(known, default=None),
        "newest_version": max(known, default=None),
    }


def sequence_record(sample: TokenSequence) -> dict[str, Any]:
    """A sequence to train on; a stream that says nothing is null.

    Example:
        {"prompt_ids": [1, 2], "ids": [3, 4], "logprobs": [-0.1, -0.7], "versions": [5, 5],
         "mask": null, "alphas": null, "experts": null}
    """
    prompt = sample.prompt_length
    logprobs, versions = sample.logprobs[prompt:], sample.versions[prompt:]
    echoes = sample.alphas.count(None) < len(sample.alphas)
    experts = sample.routed_experts
    return {
        "prompt_ids": sample.ids[:prompt],
        "ids": sample.ids[prompt:],
        "logprobs": None if all(map(math.isnan, logprobs)) else logprobs,
        "versions": None if versions.count(NOBODY) == len(versions) else versions,
        "mask": None if all(sample.sampled[prompt:]) else list(map(int, sample.sampled)),
        "alphas": sample.alphas if echoes else None,
        "experts": None if experts is None else experts.tolist(),
    }


def read_sequence(record: dict[str, Any], expert_dtype: np.dtype | None = None) -> TokenSequence:
    """The sample that `sequence_record` was given."""
    prompt, ids = record["prompt_ids"], record["ids"]
    before, count = len(prompt), len(ids)
    logprobs = record["logprobs"] or [None] * count
    experts = record["experts"]
    return TokenSequence(
        ids=prompt + ids,
        logprobs=[math.nan] * before + [math.nan if p is None else p for p in logprobs],
        sampled=list(map(bool, record["mask"] or [0] * before + [1] * count)),
        alphas=record["alphas"] or [None] * (before + count),
        routed_experts=None if experts is None else np.array(experts, dtype=expert_dtype),
        versions=[NOBODY] * before + (record["versions"] or [NOBODY] * count),
    )
