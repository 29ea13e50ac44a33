"""Every rollout of a run on disk, one file per step."""

import asyncio
import os
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torchtitan_rl.observability.json_lines import write_lines
from torchtitan_rl.rollout.record import RolloutRecord

MOST_PENDING = 4
"""Files that wait for a disk; with more, the step waits too, so that memory is bounded."""


class RolloutLog:
    """Writes on a thread of its own, so that the run does not wait for the disk.

    A file is there whole or not at all, and a step that is done again replaces it.

    Example:
        outputs/<run>/rollouts/step-000012.jsonl  step-000012-evaluation.jsonl
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout-log")
        self._pending: deque[Future] = deque()

    async def write(
        self, step: int, records: Sequence[RolloutRecord], *, evaluation: bool = False
    ) -> None:
        """Save the rollouts; an error of a write before this one is raised here."""
        if self._folder is not None:
            path = self._folder / file_name(step, evaluation=evaluation)
            await self._submit(_write, path, list(records), step)

    async def copy(self, source: Path) -> None:
        """Save the rollouts of a step that another run has saved."""
        if self._folder is not None:
            await self._submit(_copy, source, self._folder / source.name)

    def close(self) -> None:
        """Wait for what is under way."""
        self._thread.shutdown()
        while self._pending:
            self._pending.popleft().result()

    async def _submit(self, work: Callable[..., None], *args: Any) -> None:
        while self._pending and (self._pending[0].done() or len(self._pending) >= MOST_PENDING):
            await asyncio.wrap_future(self._pending.popleft())
        self._pending.append(self._thread.submit(work, *args))


def file_name(step: int, *, evaluation: bool = False) -> str:
    """The file of a step's rollouts."""
    return f"step-{step:06d}{'-evaluation' if evaluation else ''}.jsonl"


def _write(path: Path, records: Sequence[RolloutRecord], step: int) -> None:
    write_lines(path, (record.to_json(step) for record in records))


def _copy(source: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    shutil.copyfile(source, temporary)
    os.replace(temporary, path)
