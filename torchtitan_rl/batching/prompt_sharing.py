"""Which episodes share a document: samples of one prompt behind a single copy of it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan_rl.batching.documents import Document
from torchtitan_rl.batching.microbatch import Piece
from torchtitan_rl.batching.packing import deal
from torchtitan_rl.batching.schema import loss_mask, present_fields
from torchtitan_rl.core.types import Episode


@dataclass(slots=True)
class Bundle:
    """A document and the episodes in it, by index; more than one share their prompt."""

    document: Document
    members: list[int]

    def pieces(self, episodes: Sequence[Episode]) -> Iterator[tuple[int | None, Piece]]:
        """Its tokens, and whose completion is in them."""
        first, prompt = episodes[self.members[0]], 0
        if self.document.branches:
            prompt = self.document.trunk
            yield None, Piece(first, 0, prompt)
        for index in self.members:
            yield index, Piece(episodes[index], prompt, episodes[index].length)


def share(episodes: Sequence[Episode], *, parts: int, budget: int) -> list[Bundle]:
    """Bundles of samples that have their prompt in common, none of more than `budget` tokens.

    A group that is more than one of so many `parts` of the work is cut into even pieces.
    """
    groups = [_bundle(episodes, members) for members in _by_prompt(episodes)]
    fair = -(-sum(group.document.tokens for group in groups) // parts)
    return [piece for group in groups for piece in _cut(group, episodes, fair, budget)]


def _by_prompt(episodes: Sequence[Episode]) -> list[list[int]]:
    groups: dict[object, list[int]] = {}
    streams = [f for f in present_fields(episodes) if f.covers == "tokens"]
    for index, episode in enumerate(episodes):
        prompt = len(episode.prompt_token_ids)
        own = not episode.token_ids or _trains_prompt(episode)
        # Not the ids alone: whatever else is known of a prompt's tokens, the copy has it too.
        known = tuple(np.asarray(f.of(episode)[:prompt]).tobytes() for f in streams)
        groups.setdefault(index if own else (episode.group_id, known), []).append(index)
    return list(groups.values())


def _trains_prompt(episode: Episode) -> bool:
    """Whether any token of the prompt trains: then it is not the same for all samples."""
    prompt = len(episode.prompt_token_ids)
    echo = (episode.echo_alpha or [])[:prompt]
    return any(loss_mask(episode)[:prompt]) or not all(map(math.isnan, echo))


def _bundle(episodes: Sequence[Episode], members: list[int]) -> Bundle:
    first = episodes[members[0]]
    if len(members) == 1:
        return Bundle(Document(first.length), members)
    completions = tuple(len(episodes[i].token_ids) for i in members)
    return Bundle(Document(len(first.prompt_token_ids), completions), members)


def _cut(group: Bundle, episodes: Sequence[Episode], fair: int, budget: int) -> Iterator[Bundle]:
    prompt, sizes = group.document.trunk, group.document.branches
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    # With a part for each sample, all fit.
    for parts in range(-(-group.document.tokens // fair), len(sizes)):
        dealt = deal(order, sizes, sizes, budget - prompt, parts)
        if dealt is not None:
            for part in dealt:
                yield _bundle(episodes, [group.members[i] for i in sorted(part)])
            return
    for member in group.members:
        yield _bundle(episodes, [member])
