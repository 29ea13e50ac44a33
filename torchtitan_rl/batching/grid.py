"""From episodes to the grid of microbatches that the ranks run, made on the driver."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_rl.batching.schema import (
    Field,
    Microbatch,
    describe,
    microbatch,
    present_fields,
)
from torchtitan_rl.types import Episode


@dataclass(slots=True)
class Grid:
    """`cells[i][r]` is microbatch i of data-parallel rank r; every rank runs the same number."""

    cells: list[list[Microbatch]]
    loss_tokens: int
    """Tokens that train in all cells together: what the loss is divided by on every rank."""
    real_tokens: int
    """Tokens of episodes in all cells, padding left out."""

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
    by_length = sorted(episodes, key=lambda e: -e.length)
    hands = [
        _cut(by_length[rank::dp_degree], fields, tokens_per_microbatch) for rank in range(dp_degree)
    ]
    rows = max(len(hand) for hand in hands)
    for hand in hands:
        hand.extend(microbatch([], fields) for _ in range(rows - len(hand)))
    cells = [[hand[row] for hand in hands] for row in range(rows)]
    return Grid(
        cells=cells,
        loss_tokens=sum(int(cell["loss_mask"].sum()) for row in cells for cell in row),
        real_tokens=sum(e.length for e in episodes),
    )


def _cut(
    episodes: Sequence[Episode], fields: Sequence[Field], tokens_per_microbatch: int
) -> list[Microbatch]:
    """Cut episodes, sorted longest first, into microbatches within the budget."""
    batches: list[Microbatch] = []
    current: list[Episode] = []
    for episode in episodes:
        if episode.length > tokens_per_microbatch:
            raise ValueError(
                f"{describe(episode)} has {episode.length} tokens; "
                f"tokens_per_microbatch is {tokens_per_microbatch}: raise it"
            )
        # The first is the longest, so it sets the width of the rows.
        if current and (len(current) + 1) * current[0].length > tokens_per_microbatch:
            batches.append(microbatch(current, fields))
            current = []
        current.append(episode)
    if current:
        batches.append(microbatch(current, fields))
    return batches
