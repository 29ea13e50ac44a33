"""Every per-token stream of a microbatch.

Streams are declared where their values are: on the fields of `Episode`, by `PerToken`. `FIELDS` is
read off them, and everything else follows from `FIELDS`; nobody lists fields by hand.
"""

import math
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np

from torchtitan_rl.core.types import Covers, Episode, PerToken


@dataclass(frozen=True, slots=True)
class Field:
    """One stream: a value, or a row of values, for each token."""

    name: str
    dtype: str
    pad: Any
    covers: Covers
    of: Callable[[Episode], Any]
    """The episode's values, or None where it has none."""
    attribute: str
    """Of the episode; what is cut when the episode is."""
    optional: bool = False
    gaps: bool = False
    """Whether an episode's values may be NaN, where a token has none."""
    shape: tuple[int, ...] = ()
    """Of one token's value."""

    def padding(self, tokens: int) -> np.ndarray:
        """The stream of so many tokens that are none."""
        if self.pad == "distinct":
            row = np.arange(self.shape[-1], dtype=self.dtype)
            return np.broadcast_to(row, (tokens, *self.shape)).copy()
        return np.full((tokens, *self.shape), self.pad, dtype=self.dtype)


def loss_mask(episode: Episode) -> Sequence[bool]:
    """Which tokens of prompt and completion train by RL.

    Example:
        loss_mask [F, F, T, T], echo_alpha [NaN, 0.0, 0.25, NaN]: [F, F, F, T]
    """
    mask = episode.loss_mask
    if mask is None:
        mask = [False] * len(episode.prompt_token_ids) + [True] * len(episode.token_ids)
    echo = episode.echo_alpha
    if echo is None or len(echo) != len(mask):  # validation says whose length is wrong
        return mask
    return [m and math.isnan(a) for m, a in zip(mask, echo, strict=True)]


def read_fields(episode_type: type[Episode] = Episode) -> tuple[Field, ...]:
    """The tokens, which of them train, and whatever else the type declares `PerToken`."""
    found = [
        Field("tokens", "int64", 0, "tokens", lambda e: e.prompt_token_ids + e.token_ids, ""),
        Field("loss_mask", "bool", False, "tokens", loss_mask, "loss_mask"),
    ]
    for attribute, hint in typing.get_type_hints(episode_type, include_extras=True).items():
        for declared in getattr(hint, "__metadata__", ()):
            if isinstance(declared, PerToken):
                found.append(
                    Field(
                        declared.stream,
                        declared.dtype,
                        declared.pad,
                        declared.covers,
                        attrgetter(attribute),
                        attribute,
                        optional=type(None) in typing.get_args(hint.__origin__),
                        gaps=declared.gaps,
                    )
                )
    return tuple(found)


FIELDS = read_fields()


def present_fields(episodes: Sequence[Episode], fields: Sequence[Field] = FIELDS) -> list[Field]:
    """The fields this batch carries: the required ones, and the optional ones its episodes have."""
    present = []
    for field in fields:
        missing = [e for e in episodes if field.of(e) is None] if field.optional else []
        if not missing:
            present.append(_as_in(episodes[0], field))
        elif len(missing) < len(episodes):
            raise ValueError(
                f"{describe(missing[0])} has no {field.name}, which the other episodes of its "
                "batch have: give it to all of them or to none"
            )
    return present


def _as_in(episode: Episode, field: Field) -> Field:
    """An array says its own dtype, and the shape of a token's value."""
    values = field.of(episode)
    if not isinstance(values, np.ndarray):
        return field
    return replace(field, dtype=values.dtype.name, shape=values.shape[1:])


def truncate(episode: Episode, length: int, fields: Sequence[Field] = FIELDS) -> Episode:
    """The first `length` tokens of an episode; its prompt must fit."""
    completion = length - len(episode.prompt_token_ids)
    shorter: dict[str, Any] = {"token_ids": episode.token_ids[:completion]}
    for field in fields:
        values = getattr(episode, field.attribute) if field.attribute else None
        if values is not None and field.covers != "episode":
            shorter[field.attribute] = values[: length if field.covers == "tokens" else completion]
    return replace(episode, **shorter)


def describe(episode: Episode) -> str:
    return f"episode of task {episode.task!r}, group {episode.group_id!r}"
