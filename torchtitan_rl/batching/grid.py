"""From episodes to the grid of microbatches that the ranks run, made on the driver."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtitan_rl.batching.documents import Document
from torchtitan_rl.batching.microbatch import Microbatch, Piece, microbatch
from torchtitan_rl.batching.packing import pack, rank_loads
from torchtitan_rl.batching.prompt_sharing import Bundle, share
from torchtitan_rl.batching.schema import describe, present_fields
from torchtitan_rl.core.types import Episode


@dataclass(slots=True)
class Grid:
    """`cells[i][r]` is microbatch i of data-parallel rank r; every rank runs the same number."""

    cells: list[list[Microbatch]]
    places: list["Place"]
    """For each episode, where its completion is."""
    loss_tokens: int
    """Tokens that train by RL in all cells together: what its loss is divided by on every rank."""
    echo_tokens: int
    """Tokens that echo in all cells together: what their loss is divided by."""
    episode_tokens: int
    """Tokens of all episodes."""

    def read_back(self, columns: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """From what each data-parallel rank returned for its column of cells, [tokens] each, to the
        values of each episode's completion, in the episodes' order."""
        return [columns[place.rank][place.cell][place.start : place.stop] for place in self.places]

    @property
    def tokens(self) -> int:
        """Of the rows of all ranks, padding included."""
        return sum(cell.tokens for row in self.cells for cell in row)

    @property
    def padding_tokens(self) -> int:
        return sum(cell.tokens for row in self.cells for cell in row if not cell.real)

    @property
    def padding_share(self) -> float:
        """Share of the cells in which a rank has nothing to do."""
        cells = [cell for row in self.cells for cell in row]
        return sum(not cell.real for cell in cells) / len(cells)


@dataclass(slots=True)
class Place:
    """Tokens `start` to `stop` of a cell."""

    cell: int
    rank: int
    start: int
    stop: int


def make_grid(
    episodes: Sequence[Episode],
    *,
    dp_degree: int,
    tokens_per_microbatch: int,
    share_prompts: bool = False,
    hidden_size: int = 1024,
) -> Grid:
    """Pack the episodes into rows of at most `tokens_per_microbatch` tokens and deal these to the
    ranks by cost.

    With `share_prompts`, samples of one prompt lie in a row behind a single copy of it. A rank with
    fewer rows than the others gets a token of padding: no count has to be agreed on while training.
    `hidden_size` of the model says from which length on attention outweighs the rest.
    """
    if not episodes:
        raise ValueError("there are no episodes to train on")
    _check_lengths(episodes, tokens_per_microbatch)

    def plan(bundles: list[Bundle]) -> tuple[float, list[list[list[Bundle]]]]:
        """The load of the busiest rank, and what each is dealt."""
        documents = [b.document for b in bundles]
        # Forward, a token costs 24 h² operations in a layer, and each token that it sees 4 h.
        costs = [d.tokens + d.visible / (6 * hidden_size) for d in documents]
        sizes = [d.tokens for d in documents]
        dealt = pack(sizes, costs, budget=tokens_per_microbatch, ranks=dp_degree)
        return max(rank_loads(dealt, costs)), [
            [[bundles[i] for i in cell] for cell in row] for row in dealt
        ]

    if not share_prompts:
        plans = [plan([Bundle(Document(e.length), [i]) for i, e in enumerate(episodes)])]
    else:
        # Whole groups save most; smaller pieces can be dealt more evenly.
        plans = [
            plan(share(episodes, parts=dp_degree * finer, budget=tokens_per_microbatch))
            for finer in ((1, 2, 4, 8) if dp_degree > 1 else (1,))
        ]
    return _lay_out(episodes, min(plans, key=lambda planned: planned[0])[1])


def _check_lengths(episodes: Sequence[Episode], tokens_per_microbatch: int) -> None:
    for episode in episodes:
        if episode.length > tokens_per_microbatch:
            raise ValueError(
                f"{describe(episode)} has {episode.length} tokens; tokens_per_microbatch is "
                f"{tokens_per_microbatch}: raise it"
            )


def _lay_out(episodes: Sequence[Episode], dealt: list[list[list[Bundle]]]) -> Grid:
    fields = present_fields(episodes)
    places: dict[int, Place] = {}
    cells: list[list[Microbatch]] = []
    for number, row in enumerate(dealt):
        cells.append([])
        for rank, bundles in enumerate(row):
            pieces: list[Piece] = []
            stop = 0
            for bundle in bundles:
                for index, piece in bundle.pieces(episodes):
                    pieces.append(piece)
                    stop += piece.stop - piece.start
                    if index is not None:
                        start = stop - len(episodes[index].token_ids)
                        places[index] = Place(number, rank, start, stop)
            cells[-1].append(microbatch([b.document for b in bundles], pieces, fields))
    return Grid(
        cells=cells,
        places=[places[index] for index in range(len(episodes))],
        loss_tokens=sum(int(cell.streams["loss_mask"].sum()) for row in cells for cell in row),
        echo_tokens=sum(int(cell.echoes.sum()) for row in cells for cell in row),
        episode_tokens=sum(e.length for e in episodes),
    )


def grid_metrics(grids: Sequence[Grid]) -> dict[str, float]:
    """What the layout of a step's batch was like."""
    tokens, padding = sum(g.tokens for g in grids), sum(g.padding_tokens for g in grids)
    episodes = sum(g.episode_tokens for g in grids)
    return {
        "train/updates": len(grids),
        "train/tokens": tokens - padding,
        "padding_share": sum(g.padding_share for g in grids) / len(grids),
        "shared_share": 1 - (tokens - padding) / episodes,
    }


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
