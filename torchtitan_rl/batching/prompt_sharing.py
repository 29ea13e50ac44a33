"""Prompt sharing: samples of one prompt as one document, with a single copy of the prompt."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan_rl.batching.documents import Document
from torchtitan_rl.batching.microbatch import Piece
from torchtitan_rl.batching.packing import fill_bins
from torchtitan_rl.batching.schema import loss_mask, present_fields
from torchtitan_rl.core.types import Episode


@dataclass(slots=True)
class EpisodeDocument:
    """A document and the indices of its episodes; if there are several, they share their prompt."""

    document: Document
    members: list[int]

    def pieces(self, episodes: Sequence[Episode]) -> Iterator[tuple[int | None, Piece]]:
        """The pieces of the document, each with the index of the episode whose completion it
        has."""
        first, prompt = episodes[self.members[0]], 0
        if self.document.branches:
            prompt = self.document.trunk
            yield None, Piece(first, 0, prompt)
        for index in self.members:
            yield index, Piece(episodes[index], prompt, episodes[index].length)


def share_prompts_of(
    episodes: Sequence[Episode], *, parts: int, budget: int
) -> list[EpisodeDocument]:
    """Documents of samples that have their prompt in common, none of more than `budget` tokens.

    A group with more than one of `parts` equal shares of the tokens is cut into even pieces.
    """
    groups = [_document_of(episodes, members) for members in _by_prompt(episodes)]
    fair = -(-sum(group.document.tokens for group in groups) // parts)
    return [piece for group in groups for piece in _cut(group, episodes, fair, budget)]


def _by_prompt(episodes: Sequence[Episode]) -> list[list[int]]:
    groups: dict[object, list[int]] = {}
    streams = [f for f in present_fields(episodes) if f.covers == "tokens"]
    for index, episode in enumerate(episodes):
        prompt = len(episode.prompt_token_ids)
        own = not episode.token_ids or _trains_prompt(episode)
        # All streams must be equal, not the ids alone: the single copy stands for all prompts.
        known = tuple(np.asarray(f.of(episode)[:prompt]).tobytes() for f in streams)
        groups.setdefault(index if own else (episode.group_id, known), []).append(index)
    return list(groups.values())


def _trains_prompt(episode: Episode) -> bool:
    """Whether any token of the prompt trains: then samples cannot share it."""
    prompt = len(episode.prompt_token_ids)
    echo = (episode.echo_alpha or [])[:prompt]
    return any(loss_mask(episode)[:prompt]) or not all(map(math.isnan, echo))


def _document_of(episodes: Sequence[Episode], members: list[int]) -> EpisodeDocument:
    first = episodes[members[0]]
    if len(members) == 1:
        return EpisodeDocument(Document(first.length), members)
    completions = tuple(len(episodes[i].token_ids) for i in members)
    return EpisodeDocument(Document(len(first.prompt_token_ids), completions), members)


def _cut(
    group: EpisodeDocument, episodes: Sequence[Episode], fair: int, budget: int
) -> Iterator[EpisodeDocument]:
    prompt, sizes = group.document.trunk, group.document.branches
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    # With a part for each sample, all fit.
    for parts in range(-(-group.document.tokens // fair), len(sizes)):
        filled = fill_bins(order, sizes, sizes, budget - prompt, parts)
        if filled is not None:
            for part in filled:
                yield _document_of(episodes, [group.members[i] for i in sorted(part)])
            return
    for member in group.members:
        yield _document_of(episodes, [member])
