"""Rollouts of several turns, in tokens: what was shown, what was sampled, and what to train on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from torchtitan_rl.algorithms.echo import Attribution, checked_mask, echo_alphas
from torchtitan_rl.config import EchoConfig

SAMPLED = Attribution("assistant", content=True, sampled=True)
"""Of every token of the model's own."""
NOBODY = -1
"""The policy version of a token that was not sampled."""


@dataclass(slots=True)
class Rendered:
    """Messages as tokens, up to where the model's turn starts."""

    token_ids: list[int]
    attributions: list[Attribution | None] | None
    """Where each token comes from; None for a token between messages, or if nobody knows."""


@dataclass(slots=True)
class Turn:
    """One call of the generator in a conversation: the tokens it was shown, and those it sampled.

    Sampled tokens are never tokenised again: the prompt of the next turn holds them as they were.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    token_logprobs: list[float] | None
    attributions: list[Attribution | None] | None = None
    """Where each token of prompt and completion comes from; None when the renderer cannot say."""
    routed_experts: np.ndarray | None = None
    """As in Completion."""
    token_versions: list[int] | None = None
    """The weights that sampled each token; None where nobody did."""

    @classmethod
    def after(
        cls,
        shown: Rendered,
        token_ids: list[int],
        token_logprobs: list[float] | None = None,
        routed_experts: np.ndarray | None = None,
        token_versions: list[int] | None = None,
    ) -> "Turn":
        """A turn in which the model was shown this and sampled these tokens."""
        attributions = shown.attributions and shown.attributions + [SAMPLED] * len(token_ids)
        return cls(
            shown.token_ids,
            token_ids,
            token_logprobs,
            attributions,
            routed_experts,
            token_versions,
        )

    @property
    def length(self) -> int:
        return len(self.prompt_token_ids) + len(self.token_ids)


@dataclass(slots=True)
class TokenSequence:
    """Turns of which each one's prompt extends what was before it: one sequence to train on."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """NaN where nobody sampled, or nothing was recorded."""
    sampled: list[bool] = field(default_factory=list)
    alphas: list[float | None] = field(default_factory=list)
    """Echo weights."""
    routed_experts: np.ndarray | None = None
    versions: list[int] = field(default_factory=list)
    """Of the weights that sampled; -1 where nobody did."""

    @property
    def prompt_length(self) -> int:
        """Tokens before the first that was sampled."""
        return self.sampled.index(True) if True in self.sampled else len(self.ids)

    def append(self, turn: Turn, alphas: Sequence[float | None]) -> None:
        """Add what a turn has beyond these tokens; what is here stays as it is."""
        new = turn.prompt_token_ids[len(self.ids) :]
        if turn.routed_experts is not None:
            # The last token of a turn is routed only when the next one reads it.
            known = max(len(self.ids) - 1, 0)
            here = [] if self.routed_experts is None else [self.routed_experts[:known]]
            self.routed_experts = np.concatenate([*here, turn.routed_experts[known:]])
        self.alphas += alphas[len(self.ids) :]
        self.ids += new + turn.token_ids
        self.versions += [NOBODY] * len(new)
        self.versions += turn.token_versions or [NOBODY] * len(turn.token_ids)
        self.logprobs += [math.nan] * len(new)
        self.logprobs += turn.token_logprobs or [math.nan] * len(turn.token_ids)
        self.sampled += [False] * len(new) + [True] * len(turn.token_ids)

    def is_extended_by(self, turn: Turn) -> bool:
        return turn.prompt_token_ids[: len(self.ids)] == self.ids


def merge_turns(
    turns: Sequence[Turn], alphas: Sequence[Sequence[float | None]] | None = None
) -> list[TokenSequence]:
    """The sequences of a conversation, one if every turn's prompt extends the turns before it.

    A turn whose prompt extends a sequence exactly is appended to it (to the longest, if several);
    any other starts a sequence of its own. `alphas` are the echo weights of each turn's tokens.

    Example:
        >>> merge_turns([Turn([1], [2], [-0.1]), Turn([1, 2, 3], [4], [-0.2])])[0].ids
        [1, 2, 3, 4]
    """
    sequences: list[TokenSequence] = []
    for number, turn in enumerate(turns):
        weights = alphas[number] if alphas is not None else [None] * turn.length
        extended = [sequence for sequence in sequences if sequence.is_extended_by(turn)]
        if not extended:
            sequences.append(TokenSequence())
        longest = max(extended or sequences[-1:], key=lambda sequence: len(sequence.ids))
        longest.append(turn, weights)
    return sequences


def turn_alphas(
    config: EchoConfig, turns: Sequence[Turn], allowed: object = None
) -> tuple[list[list[float | None]], int]:
    """Echo weights of each turn's tokens, and in how many turns the renderer could not attribute
    all of them: if in any, only what was sampled may echo.

    `allowed` is what the filter `config.filter` returned for the rollout, if there is one.
    """
    lengths = [turn.length for turn in turns]
    masks: Sequence[list[bool] | None] = [None] * len(turns)
    if config.filter and turns:
        masks = checked_mask(config.filter, allowed, lengths)
    unattributed = sum(len(turn.attributions or ()) != turn.length for turn in turns)
    return [
        echo_alphas(config, _origins(turn, known=not unattributed), mask)
        for turn, mask in zip(turns, masks, strict=True)
    ], unattributed


def _origins(turn: Turn, *, known: bool) -> list[Attribution | None]:
    if known and turn.attributions is not None:
        return turn.attributions
    return [None] * len(turn.prompt_token_ids) + [SAMPLED] * len(turn.token_ids)
