"""Every per-token field of an episode is declared here, once. Batching, padding and the
all-padding cell follow.

A field is read from an episode by its `of`; episodes may all lack an optional field, but not some
of them. Adding a field means adding one line to `FIELDS`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from torchtitan_rl.types import Episode

Stream = Sequence[int] | Sequence[float] | Sequence[bool]
Microbatch = dict[str, torch.Tensor]
"""Field name to [rows, length]; rows are episodes, padded on the right."""


@dataclass(frozen=True, slots=True)
class Field:
    """One per-token stream, aligned with prompt_token_ids + token_ids."""

    name: str
    dtype: torch.dtype
    pad: int | float | bool
    of: Callable[[Episode], Stream | None]
    """The episode's stream, or None where it may be absent."""
    optional: bool = False


def loss_mask(episode: Episode) -> Sequence[bool]:
    """Which tokens of prompt and completion train."""
    if episode.loss_mask is not None:
        return episode.loss_mask
    return [False] * len(episode.prompt_token_ids) + [True] * len(episode.token_ids)


def _behind_the_prompt(episode: Episode, values: list[float] | None) -> Sequence[float] | None:
    if values is None:
        return None
    # Prompt tokens were not sampled. NaN, so that reading one of them is seen, never averaged in.
    return [math.nan] * len(episode.prompt_token_ids) + values


FIELDS: tuple[Field, ...] = (
    Field("tokens", torch.int64, 0, lambda e: e.prompt_token_ids + e.token_ids),
    Field("loss_mask", torch.bool, False, loss_mask),
    Field("advantages", torch.float32, 0.0, lambda e: [e.advantage] * e.length),
    Field("temperatures", torch.float32, 1.0, lambda e: [e.temperature] * e.length),
    Field("weights", torch.float32, 0.0, lambda e: [e.weight] * e.length),
    Field(
        "generator_logprobs",
        torch.float32,
        math.nan,
        lambda e: _behind_the_prompt(e, e.token_logprobs),
        optional=True,
    ),
    Field(
        "ref_logprobs",
        torch.float32,
        math.nan,
        lambda e: _behind_the_prompt(e, e.ref_logprobs),
        optional=True,
    ),
)


def present_fields(episodes: Sequence[Episode], fields: Sequence[Field] = FIELDS) -> list[Field]:
    """The fields this batch carries: the required ones, and the optional ones its episodes have."""
    present = []
    for field in fields:
        missing = [e for e in episodes if field.of(e) is None]
        if not missing:
            present.append(field)
        elif not field.optional or len(missing) < len(episodes):
            raise ValueError(
                f"{describe(missing[0])} has no {field.name}, which the other episodes of its "
                "batch have: give it to all of them or to none"
            )
    return present


def microbatch(episodes: Sequence[Episode], fields: Sequence[Field]) -> Microbatch:
    """Rows padded to the longest; no episodes give the all-padding cell of one token."""
    length = max((e.length for e in episodes), default=1)
    batch = {}
    for field in fields:
        rows = torch.full((max(len(episodes), 1), length), field.pad, dtype=field.dtype)
        for row, episode in zip(rows, episodes, strict=False):
            row[: episode.length] = torch.tensor(field.of(episode), dtype=field.dtype)
        batch[field.name] = rows
    return batch


def validate(
    episodes: Sequence[Episode],
    *,
    vocab_size: int | None = None,
    version: int | None = None,
    needs: Mapping[str, str] | None = None,
) -> None:
    """Refuse what would fail, or quietly mistrain, on a rank. Runs on the driver.

    `needs`: optional fields that must be there, each with the setting that needs it.
    """
    for episode in episodes:
        problems = chain(_problems(episode, vocab_size, version), _missing(episode, needs or {}))
        for problem in problems:
            raise ValueError(f"{describe(episode)}: {problem}")


def _missing(episode: Episode, needs: Mapping[str, str]) -> Iterator[str]:
    for field in FIELDS:
        if field.name not in needs:
            continue
        stream = field.of(episode)
        if stream is None:
            yield f"it has no {field.name}, which {needs[field.name]} needs"
        elif any(
            trains and math.isnan(value)
            for value, trains in zip(stream, loss_mask(episode), strict=True)
        ):
            yield f"it trains a token without {field.name}, which {needs[field.name]} needs"


def _problems(episode: Episode, vocab_size: int | None, version: int | None):
    ids = episode.prompt_token_ids + episode.token_ids
    if not episode.prompt_token_ids:
        yield "the prompt is empty, so its first token has nothing to be predicted from"
    if min(ids, default=0) < 0:
        yield f"token id {min(ids)} is negative"
    if vocab_size is not None and max(ids, default=0) >= vocab_size:
        yield f"token id {max(ids)} lies outside 0..{vocab_size - 1}"
    for field in FIELDS:
        stream = field.of(episode)
        if stream is not None and len(stream) != len(ids):
            yield f"{field.name} covers {len(stream)} tokens of {len(ids)}"
    new = loss_mask(episode)[len(episode.prompt_token_ids) :]
    for name in ("token_logprobs", "ref_logprobs"):
        values = getattr(episode, name)
        if values is not None and any(
            trains and not math.isfinite(value) for value, trains in zip(values, new, strict=True)
        ):
            yield f"{name} holds a value that is not finite"
    if episode.loss_mask and episode.loss_mask[0]:
        yield "loss_mask trains token 0, which has nothing to be predicted from"
    for name in ("advantage", "weight"):
        if not math.isfinite(getattr(episode, name)):
            yield f"the {name} is {getattr(episode, name)}"
    if not episode.temperature > 0:
        yield f"the temperature is {episode.temperature}; greedy samples cannot be trained on"
    if version is not None and episode.policy_version > version:
        yield f"its policy version {episode.policy_version} is newer than the trainer's {version}"


def describe(episode: Episode) -> str:
    return f"episode of task {episode.task!r}, group {episode.group_id!r}"
