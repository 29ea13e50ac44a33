"""Rollouts of several turns, in tokens: what was shown, what was sampled, and what to train on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchtitan_rl.algorithms.echo import checked_mask, echo_alphas
from torchtitan_rl.config import EchoConfig
from torchtitan_rl.core.columns import COLUMNS, Column, checked, columns_of
from torchtitan_rl.core.types import SAMPLED, Attribution, Completion, Turn, WithColumns


@dataclass(frozen=True, slots=True)
class Rendered:
    """Messages as tokens, up to where the model's turn starts."""

    token_ids: list[int]
    attributions: list[Attribution | None] | None
    """Where each token comes from; None for a token between messages, or if nobody knows."""

    def then(self, completion: Completion) -> Turn:
        """The turn in which the model was shown this and sampled the completion."""
        own: list[Attribution | None] = [SAMPLED] * len(completion.token_ids)
        return Turn(completion, self.attributions and self.attributions + own)


@dataclass(frozen=True, slots=True)
class TokenSequence(WithColumns):
    """Turns of which each one's prompt extends what was before it: one sequence to train on.

    Its prompt ends where sampling starts; what tools said in between is part of its completion.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    columns: dict[str, Any] = field(default_factory=dict)
    """The columns of its turns' completions, with loss_mask (what was sampled) and, if any of its
    tokens echoes, echo_alpha."""

    @property
    def echoes(self) -> bool:
        """Whether any of its tokens trains by cross-entropy."""
        return "echo_alpha" in self.columns


def merge_turns(
    turns: Sequence[Turn], alphas: Sequence[Sequence[float | None]] | None = None
) -> list[TokenSequence]:
    """The sequences of a conversation, one if every turn's prompt extends the turns before it.

    A turn whose prompt extends a sequence exactly is appended to it (to the longest, if several);
    any other starts a sequence of its own. `alphas` are the echo weights of each turn's tokens.

    Example:
        >>> first, second = Completion(0, 0, [1], "", [2]), Completion(0, 0, [1, 2, 3], "", [4])
        >>> [merged] = merge_turns([Turn(first), Turn(second)])
        >>> merged.prompt_token_ids, merged.token_ids
        ([1], [2, 3, 4])
    """
    growing: list[_Growing] = []
    for number, turn in enumerate(turns):
        weights = alphas[number] if alphas is not None else [None] * turn.length
        extended = [sequence for sequence in growing if sequence.is_extended_by(turn)]
        if not extended:
            growing.append(_Growing())
        longest = max(extended or growing[-1:], key=lambda sequence: len(sequence.ids))
        longest.append(turn.completion, weights)
    return [sequence.merged() for sequence in growing]


@dataclass(slots=True)
class _Growing:
    """A sequence that turns are appended to. All its columns have a value for every token."""

    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    alphas: list[float] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)

    def is_extended_by(self, turn: Turn) -> bool:
        return turn.prompt_token_ids[: len(self.ids)] == self.ids

    def append(self, turn: Completion, alphas: Sequence[float | None]) -> None:
        """Add what a turn has beyond these tokens; what is here stays as it is."""
        before, shown = len(self.ids), turn.prompt_token_ids[len(self.ids) :]
        given = {column.name: values for column, values in columns_of(turn.columns)}
        for name in {**self.columns, **given}:
            column, here = COLUMNS[name], self.columns.get(name)
            self.columns[name] = _extended(column, here, given.get(name), before, turn)
        self.ids += shown + turn.token_ids
        self.sampled += [False] * len(shown) + [True] * len(turn.token_ids)
        self.alphas += [math.nan if alpha is None else alpha for alpha in alphas[before:]]

    def merged(self) -> TokenSequence:
        prompt = self.sampled.index(True) if True in self.sampled else len(self.ids)
        columns: dict[str, Any] = {
            name: values if COLUMNS[name].covers == "tokens" else values[prompt:]
            for name, values in self.columns.items()
        }
        columns["loss_mask"] = self.sampled
        if not all(map(math.isnan, self.alphas)):
            columns["echo_alpha"] = self.alphas
        return TokenSequence(self.ids[:prompt], self.ids[prompt:], checked(columns))


def _extended(column: Column, here: Any, values: Any, before: int, turn: Completion) -> Any:
    """The column of a sequence of `before` tokens, with what a turn adds to it."""
    array = next((v for v in (here, values) if isinstance(v, np.ndarray)), None)

    def padding(tokens: int) -> Any:
        if array is not None:
            return column.padding(tokens, array.shape[1:], array.dtype.name)
        return [column.pad] * tokens

    if values is None:
        parts = [here, padding(turn.length - before)]
    elif column.covers == "completion":
        start = len(turn.prompt_token_ids)
        _check_length(column, values, len(turn.token_ids))
        parts = [padding(before) if here is None else here, padding(start - before), values]
    else:
        _check_length(column, values, turn.length)
        # The last tokens of a turn have their value only when the next turn reads them.
        known = 0 if here is None else max(before - column.lag, 0)
        parts = [padding(0) if here is None else here[:known], values[known:]]
    return np.concatenate(parts) if array is not None else [v for part in parts for v in part]


def _check_length(column: Column, values: Any, tokens: int) -> None:
    if len(values) != tokens:
        raise ValueError(f"{column.name} has {len(values)} values for {tokens} tokens")


def turn_alphas(
    config: EchoConfig, turns: Sequence[Turn], allowed: object = None
) -> tuple[list[list[float | None]], int]:
    """Echo weights of each turn's tokens, and in how many turns the renderer could not attribute
    all of them: of such a turn only what was sampled may echo.

    `allowed` is what the filter `config.filter` returned for the rollout, if there is one.
    """
    lengths = [turn.length for turn in turns]
    masks: Sequence[list[bool] | None] = [None] * len(turns)
    if config.filter and turns:
        masks = checked_mask(config.filter, allowed, lengths)
    alphas = [
        echo_alphas(config, origins(turn), mask, first_turn=number == 0)
        for number, (turn, mask) in enumerate(zip(turns, masks, strict=True))
    ]
    return alphas, sum(not attributed(turn) for turn in turns)


def attributed(turn: Turn) -> bool:
    """Whether the renderer has said of each token of a turn where it comes from."""
    return turn.attributions is not None and len(turn.attributions) == turn.length


def origins(turn: Turn) -> list[Attribution | None]:
    """Where each token of a turn comes from; of a turn that is not attributed, only what was
    sampled is known."""
    if turn.attributions is not None and attributed(turn):
        return turn.attributions
    return [None] * len(turn.prompt_token_ids) + [SAMPLED] * len(turn.token_ids)
