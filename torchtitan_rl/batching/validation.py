"""Checks of episodes, on the driver, before any rank sees them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np

from torchtitan_rl.batching.schema import Field, describe, fields, loss_mask
from torchtitan_rl.core.experts import Experts
from torchtitan_rl.core.types import Episode


def validate(
    episodes: Sequence[Episode],
    *,
    vocab_size: int | None = None,
    version: int | None = None,
    experts: Experts | None = None,
) -> None:
    """Refuse what would fail, or quietly mistrain, on a rank."""
    declared = fields()
    for episode in episodes:
        _refuse(
            episode,
            _structure(episode, vocab_size, version),
            *(_values(episode, field) for field in declared),
            _routing(episode, experts),
        )


def require(episodes: Sequence[Episode], needs: Mapping[str, str]) -> None:
    """Refuse episodes without the columns in `needs`, each named with its setting."""
    needed = [field for field in fields() if field.name in needs]
    for episode in episodes:
        for field in needed:
            missing = _missing(episode, field, needs[field.name])
            _refuse(episode, missing, _values(episode, field))


def _refuse(episode: Episode, *problems: Iterator[str]) -> None:
    for problem in chain(*problems):
        raise ValueError(f"{describe(episode)}: {problem}")


def _structure(episode: Episode, vocab_size: int | None, version: int | None) -> Iterator[str]:
    ids = episode.prompt_token_ids + episode.token_ids
    if not episode.prompt_token_ids:
        yield "the prompt is empty, so its first token has nothing to be predicted from"
    if min(ids) < 0:
        yield f"token id {min(ids)} is negative"
    if vocab_size is not None and max(ids) >= vocab_size:
        yield f"token id {max(ids)} lies outside 0..{vocab_size - 1}"
    if episode.loss_mask is not None and any(episode.loss_mask[:1]):
        yield "loss_mask trains token 0, which has nothing to be predicted from"
    if episode.echo_alpha and not math.isnan(episode.echo_alpha[0]):
        yield "echo_alpha trains token 0, which has nothing to be predicted from"
    if not episode.temperature > 0:
        yield f"the temperature is {episode.temperature}; greedy samples cannot be trained on"
    if version is not None and episode.policy_version > version:
        yield f"its policy version {episode.policy_version} is newer than the trainer's {version}"


def _values(episode: Episode, field: Field) -> Iterator[str]:
    values = field.of(episode)
    if values is None:
        if not field.optional:
            yield f"it has no {field.name}"
        return
    if field.covers == "episode":
        if not math.isfinite(values):
            yield f"the {field.name} is {values}"
        return
    tokens = episode.length if field.covers == "tokens" else len(episode.token_ids)
    if len(values) != tokens:
        yield f"{field.name} has {len(values)} values for {tokens} tokens"
    if not field.dtype.startswith("float"):
        return
    total = values.sum() if isinstance(values, np.ndarray) else sum(values)
    if math.isfinite(total):
        return  # as nearly always; a sum is quick, and not finite if a value is not
    finite = np.isfinite(values)
    if field.gaps:
        if not (finite | np.isnan(values)).all():
            yield f"{field.name} holds a value that is not finite"
    elif not finite.all():
        trains = np.array(loss_mask(episode)[episode.length - tokens :], dtype=bool)
        if not finite[trains].all():
            yield f"{field.name} holds a value that is not finite"


def _routing(episode: Episode, experts: Experts | None) -> Iterator[str]:
    if episode.routed_experts is None:
        return
    if experts is None:
        yield "it has routed_experts, but the model has no experts"
    elif problem := experts.problem(episode.routed_experts):
        yield problem


def _missing(episode: Episode, field: Field, setting: str) -> Iterator[str]:
    if field.of(episode) is None:
        yield f"it has no {field.name}, which {setting} needs"
    prompt = len(episode.prompt_token_ids)
    if field.covers == "completion" and any(loss_mask(episode)[:prompt]):
        yield f"it trains a token of the prompt, which has no {field.name}; {setting} needs it"
