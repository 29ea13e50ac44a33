"""Every per-token stream of a microbatch: the tokens, which of them train, and all other columns.

Streams are declared as columns (core/columns.py), by us or by whoever makes them. Slicing, packing,
padding, validation and the all-padding cell follow from the declaration alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchtitan_rl.core.columns import COLUMNS, Column, columns_of
from torchtitan_rl.core.types import Episode


@dataclass(frozen=True, slots=True)
class Field:
    """One stream: a value, or a row of values, for each token."""

    column: Column
    of: Callable[[Episode], Any]
    """The episode's values, or None where it has none."""
    dtype: str
    shape: tuple[int, ...] = ()
    """The shape of one token's value."""

    @property
    def name(self) -> str:
        return self.column.name

    @property
    def covers(self) -> str:
        return self.column.covers

    @property
    def optional(self) -> bool:
        return self.column.optional

    @property
    def gaps(self) -> bool:
        return self.column.gaps

    def padding(self, tokens: int) -> np.ndarray:
        """The stream of a row of padding, `tokens` tokens long."""
        return self.column.padding(tokens, self.shape, self.dtype)


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


TOKENS = Column("tokens", "int64", 0, "tokens", made_by="rollout", optional=False)
"""The ids of prompt and completion."""
_COMPUTED: dict[str, Callable[[Episode], Any]] = {
    "tokens": lambda episode: episode.prompt_token_ids + episode.token_ids,
    "loss_mask": loss_mask,
}
"""Streams that every episode has, whether or not it was given the column."""


def fields() -> tuple[Field, ...]:
    """The tokens, which of them train, and whatever else is declared."""
    return tuple(
        Field(column, _COMPUTED.get(column.name) or _reader(column.name), column.dtype)
        for column in (TOKENS, *COLUMNS.values())
    )


def _reader(name: str) -> Callable[[Episode], Any]:
    return lambda episode: episode.columns.get(name)


def present_fields(episodes: Sequence[Episode]) -> list[Field]:
    """The fields this batch carries: the required ones, and the optional ones its episodes have."""
    present = []
    for field in fields():
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


def truncate(episode: Episode, length: int) -> Episode:
    """The first `length` tokens of an episode; its prompt must fit."""
    completion = length - len(episode.prompt_token_ids)
    kept = {"tokens": length, "completion": completion}
    shorter = {
        column.name: values[: kept[column.covers]]
        for column, values in columns_of(episode.columns)
        if column.covers in kept
    }
    return replace(
        episode,
        token_ids=episode.token_ids[:completion],
        columns={**episode.columns, **shorter},
    )


def describe(episode: Episode) -> str:
    return f"episode of task {episode.task!r}, group {episode.group_id!r}"
