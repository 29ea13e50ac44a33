"""Token export: what the trainer computed for every token, in outputs/<run>/tokens/."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch

from torchtitan_rl.algorithms.objective import Objective
from torchtitan_rl.algorithms.policy_loss import LossOutput, ratio_of
from torchtitan_rl.batching.documents import positions, segments
from torchtitan_rl.batching.microbatch import Microbatch
from torchtitan_rl.observability.json_lines import write_lines

SCHEMA = 2
"""Version of the records; increases when a reader of older records would misread new ones."""

HOLD_SECONDS = 0.2
"""How long writing is delayed: only one thread of a process runs Python at a time, and the step's
result and weights, which others wait for, go first."""

Columns = dict[str, np.ndarray]
"""Name to [tokens] of a row."""


class TokenExport:
    """Collects a step's microbatches and writes them on a thread, while the trainer continues.

    The thread computes nothing with torch: an operation there may start OpenMP threads, and with
    more of them than cores none waits awake for the trainer's next operation. A short operation on
    two threads then takes 0.1 ms instead of 0.014.

    There is one file per step and rank, complete or absent; a repeated step replaces its file.

    Example:
        export = TokenExport(Path("outputs/run/tokens"), rank=0)
        export.add(cell, logprobs, entropies, output)
        export.write(step=12)  # tokens/step-000012-rank-0.jsonl
        export.flush()
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._rows: list[tuple[Microbatch, Columns]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="token-export")
        self._writing: Future | None = None
        self._hurry = Event()
        """Set when a caller waits for the file."""

    def clear(self) -> None:
        """Discard rows that are not written yet: of a failed step, or a trial."""
        self._rows = []

    def add(
        self,
        cell: Microbatch,
        logprobs: torch.Tensor,
        entropies: torch.Tensor,
        output: LossOutput | Objective,
    ) -> None:
        """Keep what was computed for a microbatch; padding is left out. Call this on the thread
        that trains."""
        if cell.real:
            self._rows.append((cell, cell_columns(cell, logprobs, entropies, output)))

    def write(self, step: int) -> None:
        """Start writing the rows added since the last step; an error of the last file is raised."""
        self.flush()
        path = self._folder / f"step-{step:06d}-rank-{self._rank}.jsonl"
        rows, self._rows = self._rows, []
        self._hurry.clear()
        self._writing = self._thread.submit(self._write, path, rows, step)

    def flush(self) -> None:
        """Wait until everything is on disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            self._hurry.set()
            writing.result()

    def _write(self, path: Path, rows: Sequence[tuple[Microbatch, Columns]], step: int) -> None:
        self._hurry.wait(HOLD_SECONDS)
        own = {"schema": SCHEMA, "step": step, "rank": self._rank}
        write_lines(path, ({**own, **record} for row in rows for record in token_records(*row)))


def token_records(cell: Microbatch, known: Columns) -> Iterator[dict[str, Any]]:
    """A record for each sequence of a microbatch, cut from its `cell_columns`.

    A column is a list with a value for every token of prompt and completion, null where a token has
    none. A prompt that several sequences share is repeated in each.

    Example:
        {"name": "sums/train/7/3/0", "tokens": [5, 9], "positions": [0, 1], "rl": [0, 1], ...}
    """
    row = segments(cell.documents)
    columns = {column: values.tolist() for column, values in known.items()}
    shared = {segment.trunk.start for segment in row if segment.trunk}
    for segment, name in zip(row, cell.names, strict=True):
        if segment.start in shared:
            continue
        trunk = segment.trunk
        record: dict[str, Any] = {"name": name}
        for column, values in columns.items():
            record[column] = values[segment.start : segment.stop]
            if trunk:
                record[column] = values[trunk.start : trunk.stop] + record[column]
        tokens = segment.length + (trunk.length if trunk else 0)
        assert all(len(record[column]) == tokens for column in columns)
        yield record


def cell_columns(
    cell: Microbatch,
    logprobs: torch.Tensor,
    entropies: torch.Tensor,
    output: LossOutput | Objective,
) -> Columns:
    """Columns with a value for each token of the row, NaN where there is none. `logprobs` and
    `entropies` cover the tokens that train."""
    streams = cell.streams
    rl, echo = streams["loss_mask"], cell.echoes
    trained = rl | echo
    nothing = torch.full(rl.shape, torch.nan)
    trainer, entropy = nothing.clone(), nothing.clone()
    trainer[trained], entropy[trained] = logprobs.detach().cpu(), entropies.detach().cpu()
    generator = streams.get("token_logprobs", nothing)
    old = streams.get("old_logprobs", trainer)  # in the first update of a step, they are the same
    masked = torch.zeros(rl.shape, dtype=torch.int8)
    for sign, held in ((-1, output.low), (1, output.high)):
        if held is not None:
            masked[rl.nonzero().squeeze(-1)[held.cpu()]] = sign
    columns = {
        "tokens": streams["tokens"],
        "rl": rl.to(torch.int8),
        "echo": echo.to(torch.int8),
        "advantage": torch.where(rl, streams["advantage"], nothing),
        "token_logprobs": generator,
        "trainer_logprobs": trainer,
        "entropies": entropy,
        "ratios": torch.where(rl, ratio_of(trainer - old), nothing),
        "mismatches": torch.where(rl, (old - generator).abs(), nothing),
        "masked": masked,
        "positions": positions(segments(cell.documents)),
    }
    return {name: values.numpy() for name, values in columns.items()}
