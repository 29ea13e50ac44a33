"""The grid of microbatches that the trainer's ranks run, made from episodes by the controller."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtitan_rl.batching.documents import Document
from torchtitan_rl.batching.microbatch import Microbatch, Piece, microbatch
from torchtitan_rl.batching.packing import pack, rank_loads
from torchtitan_rl.batching.prompt_sharing import EpisodeDocument, share_prompts_of
from torchtitan_rl.batching.reduction import weigh
from torchtitan_rl.batching.schema import describe, present_fields
from torchtitan_rl.config.trainer import TrainerConfig
from torchtitan_rl.core.types import Episode


@dataclass(slots=True)
class Grid:
    """`cells[i][r]` is microbatch i of data-parallel rank r; every rank runs the same number."""

    cells: list[list[Microbatch]]
    spans: list["Span"]
    """Per episode, where its completion is."""
    loss_tokens: int
    """Tokens that train by RL, over all cells: the divisor of the RL loss on every rank."""
    echo_tokens: int
    """Tokens that echo, over all cells: the divisor of the echo loss on every rank."""
    episode_tokens: int
    """Tokens of all episodes, shared prompts counted once per episode."""

    @property
    def dp_degree(self) -> int:
        """Number of data-parallel ranks that the cells are for."""
        return len(self.cells[0])

    def of_rank(self, dp_rank: int) -> "RankCells":
        """The part that a data-parallel rank is sent."""
        cells = [row[dp_rank] for row in self.cells]
        return RankCells(cells, dp_rank, self.loss_tokens, self.echo_tokens)

    def read_back(self, columns: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Values of each episode's completion, in the episodes' order, from the [tokens] values
        that each data-parallel rank returned for its column of cells."""
        return [columns[span.rank][span.cell][span.start : span.stop] for span in self.spans]

    @property
    def tokens(self) -> int:
        """Tokens of all cells, padding included."""
        return sum(cell.tokens for row in self.cells for cell in row)

    @property
    def padding_tokens(self) -> int:
        """Tokens of the cells without an episode."""
        return sum(cell.tokens for row in self.cells for cell in row if not cell.real)

    @property
    def padding_share(self) -> float:
        """Share of the cells without an episode, in which a rank has nothing to do."""
        cells = [cell for row in self.cells for cell in row]
        return sum(not cell.real for cell in cells) / len(cells)


@dataclass(slots=True)
class RankCells:
    """What one data-parallel rank needs of a grid. How much that is does not depend on the number
    of ranks."""

    cells: list[Microbatch]
    dp_rank: int
    """The rank whose cells they are."""
    loss_tokens: int
    """Tokens that train by RL, over the cells of all ranks."""
    echo_tokens: int
    """Tokens that echo, over the cells of all ranks."""


@dataclass(slots=True)
class Span:
    """Tokens `start` to `stop` of the cell of a rank."""

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
    """Pack the episodes into rows of at most `tokens_per_microbatch` tokens and assign these to the
    ranks by cost.

    With `share_prompts`, samples of one prompt lie in a row after a single copy of it. A rank with
    fewer rows than the others gets a token of padding, so that all ranks run the same number of
    microbatches. `hidden_size` of the model decides from which length on attention outweighs the
    rest.
    """
    if not episodes:
        raise ValueError("there are no episodes to train on")
    _check_lengths(episodes, tokens_per_microbatch)

    def assignment(
        items: list[EpisodeDocument],
    ) -> tuple[float, list[list[list[EpisodeDocument]]]]:
        """The load of the busiest rank, and the documents of each microbatch and rank."""
        documents = [item.document for item in items]
        # Per layer, a token costs 24 h² operations, and each token that it attends to 4 h.
        costs = [d.tokens + d.visible / (6 * hidden_size) for d in documents]
        sizes = [d.tokens for d in documents]
        rows = pack(sizes, costs, budget=tokens_per_microbatch, ranks=dp_degree)
        return max(rank_loads(rows, costs)), [
            [[items[i] for i in cell] for cell in row] for row in rows
        ]

    if not share_prompts:
        alone = [EpisodeDocument(Document(e.length), [i]) for i, e in enumerate(episodes)]
        candidates = [assignment(alone)]
    else:
        # Whole groups save most; smaller pieces can be assigned more evenly.
        candidates = [
            assignment(
                share_prompts_of(episodes, parts=dp_degree * finer, budget=tokens_per_microbatch)
            )
            for finer in ((1, 2, 4, 8) if dp_degree > 1 else (1,))
        ]
    return _lay_out(episodes, min(candidates, key=lambda candidate: candidate[0])[1])


def weighed_grid(
    episodes: Sequence[Episode], *, config: TrainerConfig, hidden_size: int, fixed_length: int
) -> Grid:
    """The grid of an optimizer step as the trainer's config wants it: the episodes weighed by the
    loss's reduction, and packed for the trainer's ranks.

    `fixed_length` is what the reduction of that name divides by.
    """
    return make_grid(
        weigh(episodes, config.loss.reduction, fixed_length=fixed_length),
        dp_degree=config.parallelism.dp_degree,
        tokens_per_microbatch=config.tokens_per_microbatch,
        share_prompts=config.share_prompts,
        hidden_size=hidden_size,
    )


def _check_lengths(episodes: Sequence[Episode], tokens_per_microbatch: int) -> None:
    for episode in episodes:
        if episode.length > tokens_per_microbatch:
            raise ValueError(
                f"{describe(episode)} has {episode.length} tokens; tokens_per_microbatch is "
                f"{tokens_per_microbatch}: raise it"
            )


def _lay_out(episodes: Sequence[Episode], rows: list[list[list[EpisodeDocument]]]) -> Grid:
    fields = present_fields(episodes)
    spans: dict[int, Span] = {}
    cells: list[list[Microbatch]] = []
    for number, row in enumerate(rows):
        cells.append([])
        for rank, items in enumerate(row):
            pieces: list[Piece] = []
            stop = 0
            for item in items:
                for index, piece in item.pieces(episodes):
                    pieces.append(piece)
                    stop += piece.stop - piece.start
                    if index is not None:
                        start = stop - len(episodes[index].token_ids)
                        spans[index] = Span(number, rank, start, stop)
            cells[-1].append(microbatch([item.document for item in items], pieces, fields))
    return Grid(
        cells=cells,
        spans=[spans[index] for index in range(len(episodes))],
        loss_tokens=sum(int(cell.streams["loss_mask"].sum()) for row in cells for cell in row),
        echo_tokens=sum(int(cell.echoes.sum()) for row in cells for cell in row),
        episode_tokens=sum(e.length for e in episodes),
    )


def grid_metrics(grids: Sequence[Grid]) -> dict[str, float]:
    """Metrics of how a step's batch is laid out."""
    tokens, padding = sum(g.tokens for g in grids), sum(g.padding_tokens for g in grids)
    episodes = sum(g.episode_tokens for g in grids)
    return {
        "train/updates": len(grids),
        "train/tokens": tokens - padding,
        "padding_share": sum(g.padding_share for g in grids) / len(grids),
        "shared_share": 1 - (tokens - padding) / episodes,
    }


def split_groups(episodes: Sequence[Episode], parts: int) -> list[list[Episode]]:
    """Split a batch into at most `parts` parts of whole prompt groups, in turn; none is empty.

    Example:
        Groups a b c d e in 2 parts: a c e and b d.
    """
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.group_id, []).append(episode)
    split = [list(groups.values())[part::parts] for part in range(parts)]
    return [[episode for group in part for episode in group] for part in split if part]
