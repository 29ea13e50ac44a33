"""From episodes to the grid of microbatches that the ranks run, made on the driver."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtitan_rl.batching.schema import Microbatch, describe, microbatch, present_fields
from torchtitan_rl.types import Episode


@dataclass(slots=True)
class Grid:
    """`cells[i][r]` is microbatch i of data-parallel rank r; every rank runs the same number."""

    cells: list[list[Microbatch]]
    origins: list[list[list[int]]]
    """`origins[i][r]`: the episodes, by index, that are the rows of that microbatch."""
    loss_tokens: int
    """Tokens that train in all cells together: what the loss is divided by on every rank."""
    real_tokens: int
    """Tokens of episodes in all cells, padding left out."""

    def read_back(self, columns: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """From what each data-parallel rank returned for its column of cells, [rows, length] each,
        to one row per episode, in the episodes' order; a row may end in padding."""
        found = {
            origin: values[row]
            for rank, column in enumerate(columns)
            for cell, values in enumerate(column)
            for row, origin in enumerate(self.origins[cell][rank])
        }
        return [found[index] for index in range(len(found))]

    @property
    def padding_share(self) -> float:
        total = sum(cell["tokens"].numel() for row in self.cells for cell in row)
        return 1 - self.real_tokens / total


def make_grid(episodes: Sequence[Episode], *, dp_degree: int, tokens_per_microbatch: int) -> Grid:
    """Deal the episodes, longest first, to the ranks in turn, and cut each hand into microbatches
    of at most `tokens_per_microbatch` cells, padding included.

    Episodes of like length share a microbatch, so little is padding. A rank with fewer microbatches
    than the others gets an all-padding one: no count has to be agreed on while training.
    """
    if not episodes:
        raise ValueError("there are no episodes to train on")
    fields = present_fields(episodes)
    by_length = sorted(range(len(episodes)), key=lambda i: -episodes[i].length)
    hands = [
        _cut(episodes, by_length[rank::dp_degree], tokens_per_microbatch)
        for rank in range(dp_degree)
    ]
    rows = max(len(hand) for hand in hands)
    origins = [[hand[row] if row < len(hand) else [] for hand in hands] for row in range(rows)]
    cells = [[microbatch([episodes[i] for i in cell], fields) for cell in row] for row in origins]
    return Grid(
        cells=cells,
        origins=origins,
        loss_tokens=sum(int(cell["loss_mask"].sum()) for row in cells for cell in row),
        real_tokens=sum(e.length for e in episodes),
    )


def _cut(
    episodes: Sequence[Episode], hand: Sequence[int], tokens_per_microbatch: int
) -> list[list[int]]:
    """Cut a hand of episodes, by index and longest first, into microbatches within the budget."""
    cells: list[list[int]] = []
    for index in hand:
        length = episodes[index].length
        if length > tokens_per_microbatch:
            raise ValueError(
                f"{describe(episodes[index])} has {length} tokens; "
                f"tokens_per_microbatch is {tokens_per_microbatch}: raise it"
            )
        # The first is the longest, so it sets the width of the rows.
        if cells and (len(cells[-1]) + 1) * episodes[cells[-1][0]].length <= tokens_per_microbatch:
            cells[-1].append(index)
        else:
            cells.append([index])
    return cells


def deal_groups(episodes: Sequence[Episode], parts: int) -> list[list[Episode]]:
    """Split a batch into at most `parts` of whole prompt groups, dealt in turn; none is empty.

    Example:
        Groups a b c d e in 2 parts: a c e and b d.
    """
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.group_id, []).append(episode)
    hands = [list(groups.values())[part::parts] for part in range(parts)]
    return [[episode for group in hand for episode in group] for hand in hands if hand]
