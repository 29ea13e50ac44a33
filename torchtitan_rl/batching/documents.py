"""Documents of a packed row: runs of tokens that attend to nothing outside themselves."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch


@dataclass(slots=True)
class Document:
    """A trunk of tokens, and branches that continue it, one after the other in the row.

    A token of the trunk attends to the trunk before it. A token of a branch attends to the whole
    trunk and to its branch before it, never to another branch. A single episode is all trunk; for
    samples that share a prompt, the prompt is the trunk and the completions are the branches.

    Example:
        Document(trunk=3, branches=(2, 4))  # 9 tokens: two completions of one prompt
    """

    trunk: int
    branches: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of the trunk and all branches."""
        return self.trunk + sum(self.branches)

    @property
    def visible(self) -> int:
        """Pairs of a token and a token that it attends to, itself included: what attention
        costs."""
        return _triangle(self.trunk) + sum(b * self.trunk + _triangle(b) for b in self.branches)


@dataclass(slots=True)
class Segment:
    """A trunk or a branch, with its position in the row."""

    start: int
    length: int
    trunk: "Segment | None" = None
    """The trunk that a branch continues; None for a trunk."""

    @property
    def stop(self) -> int:
        """Index in the row after the last token."""
        return self.start + self.length

    @property
    def first_position(self) -> int:
        """Position of the first token in its document."""
        return self.trunk.length if self.trunk else 0


def segments(documents: Sequence[Document]) -> list[Segment]:
    """Trunks and branches of a row, in order.

    Example:
        >>> [(s.start, s.length) for s in segments([Document(4), Document(3, (2, 1))])]
        [(0, 4), (4, 3), (7, 2), (9, 1)]
    """
    found = []
    starts = accumulate((d.tokens for d in documents), initial=0)
    for document, start in zip(documents, starts, strict=False):
        trunk = Segment(start, document.trunk)
        found.append(trunk)
        for length in document.branches:
            found.append(Segment(found[-1].stop, length, trunk))
    return found


def positions(row: Sequence[Segment]) -> torch.Tensor:
    """[tokens] position of each token in its document; a branch continues from its trunk."""
    return torch.from_numpy(_counted(row, [segment.first_position for segment in row]))


def segment_ids(row: Sequence[Segment]) -> torch.Tensor:
    """[tokens] number of the segment that each token is in."""
    lengths = [segment.length for segment in row]
    return torch.from_numpy(np.repeat(np.arange(len(row)), lengths))


def predecessors(row: Sequence[Segment]) -> torch.Tensor:
    """[tokens] index of each token's predictor: the token before it, or the last of the trunk.

    The first token of a trunk has no predictor; its entry must not be used.
    """
    before = _counted(row, [segment.start - 1 for segment in row])
    branches = [segment for segment in row if segment.trunk]
    before[[b.start for b in branches]] = [b.trunk.stop - 1 for b in branches if b.trunk]
    return torch.from_numpy(before).clamp_(min=0)


def _counted(row: Sequence[Segment], firsts: Sequence[int]) -> np.ndarray:
    """[tokens] counted up within each segment, from that segment's entry of `firsts`."""
    lengths = np.array([segment.length for segment in row])
    starts = np.array([segment.start for segment in row])
    return np.arange(lengths.sum()) + np.repeat(np.array(firsts) - starts, lengths)


def _triangle(length: int) -> int:
    return length * (length + 1) // 2
