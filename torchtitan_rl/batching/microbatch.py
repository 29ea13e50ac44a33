"""A row of packed documents with everything a rank needs to know about each token."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from torchtitan_rl.batching.documents import Document
from torchtitan_rl.batching.schema import Field, present_fields
from torchtitan_rl.core.types import Episode


@dataclass(slots=True)
class Piece:
    """Tokens `start` to `stop` of an episode's prompt and completion."""

    episode: Episode
    start: int
    stop: int

    @property
    def prompt_tokens(self) -> int:
        """How many of them belong to the prompt."""
        return max(min(self.stop, len(self.episode.prompt_token_ids)) - self.start, 0)

    @property
    def ends(self) -> bool:
        """Whether the episode ends with it; else it is a prompt that several episodes share."""
        return self.stop == self.episode.length

    def cut(self, values: Any, field: Field) -> Any:
        """The part of an episode's values that lies in this piece."""
        first = len(self.episode.prompt_token_ids) if field.covers == "completion" else 0
        start, stop = max(self.start - first, 0), max(self.stop - first, 0)
        return values if start == 0 and stop == len(values) else values[start:stop]


@dataclass(slots=True)
class Microbatch:
    """One row: documents one after the other, and a stream of values for each field."""

    documents: list[Document]
    streams: dict[str, torch.Tensor]
    """Field name to [tokens] or [tokens, ...]."""
    real: bool = True
    """Whether it holds any episode; else it is a token of padding that keeps a rank in step."""
    tasks: list[str] = field(default_factory=list)
    """The task of each segment of the row; empty in padding."""
    names: list[str] = field(default_factory=list)
    """For each segment, the name of the sequence that ends with it; '' for a prompt that several
    share."""

    @property
    def tokens(self) -> int:
        return len(self.streams["tokens"])

    def __getstate__(self) -> tuple:
        # As arrays: torch pickles every tensor like a file of its own.
        arrays = {name: stream.numpy() for name, stream in self.streams.items()}
        return self.documents, arrays, self.real, self.tasks, self.names

    def __setstate__(self, state: tuple) -> None:
        self.documents, arrays, self.real, self.tasks, self.names = state
        self.streams = {name: torch.from_numpy(array) for name, array in arrays.items()}

    @property
    def echoes(self) -> torch.Tensor:
        """[tokens] which train by cross-entropy, beside RL."""
        if "echo_alpha" not in self.streams:
            return torch.zeros(self.tokens, dtype=torch.bool)
        return ~self.streams["echo_alpha"].isnan()

    def with_echo_scaled(self, factor: float) -> "Microbatch":
        """The row with all its echo weights multiplied by a factor."""
        if factor == 1.0 or "echo_alpha" not in self.streams:
            return self
        alphas = self.streams["echo_alpha"] * factor
        return replace(self, streams={**self.streams, "echo_alpha": alphas})


def microbatch(
    documents: Sequence[Document], pieces: Sequence[Piece], fields: Sequence[Field]
) -> Microbatch:
    """The row of these documents, whose tokens are those of `pieces`; of none: one of padding."""
    if not documents:
        padding = {field.name: torch.from_numpy(field.padding(1)) for field in fields}
        return Microbatch([Document(1)], padding, real=False)
    streams = {field.name: torch.from_numpy(_stream(field, pieces)) for field in fields}
    return Microbatch(
        list(documents),
        streams,
        tasks=[piece.episode.task for piece in pieces],
        names=[piece.episode.name if piece.ends else "" for piece in pieces],
    )


def single(episode: Episode) -> Microbatch:
    """A microbatch of one episode, for tests and study."""
    piece = Piece(episode, 0, episode.length)
    return microbatch([Document(episode.length)], [piece], present_fields([episode]))


def _stream(field: Field, pieces: Sequence[Piece]) -> np.ndarray:
    values = [field.of(piece.episode) for piece in pieces]
    lengths = [piece.stop - piece.start for piece in pieces]
    if field.covers == "episode":
        return np.repeat(np.array(values, dtype=field.dtype), lengths)
    cut = [piece.cut(all_of, field) for piece, all_of in zip(pieces, values, strict=True)]
    if field.covers == "tokens":
        return _joined(cut, field)
    row = field.padding(sum(lengths))
    row[_in_completions(pieces, lengths)] = _joined(cut, field)
    return row


def _joined(parts: Sequence[Any], field: Field) -> np.ndarray:
    if field.shape:
        return np.concatenate(parts)
    # The fastest way from many short lists to one array.
    count = sum(map(len, parts))
    return np.fromiter(chain.from_iterable(parts), dtype=field.dtype, count=count)


def _in_completions(pieces: Iterable[Piece], lengths: Iterable[int]) -> np.ndarray:
    counts = [
        count
        for piece, length in zip(pieces, lengths, strict=True)
        for count in (piece.prompt_tokens, length - piece.prompt_tokens)
    ]
    return np.repeat(np.tile([False, True], len(counts) // 2), counts)
