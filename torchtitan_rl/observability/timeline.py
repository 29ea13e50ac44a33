"""Timeline of a run: what each actor did when, as spans on one time axis."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

MOST_BYTES = 64 << 20
"""A larger file is renamed to `timeline.old.json`, which replaces an earlier one."""

END, NO_END = "\n]\n", " ,\n"
"""The end of the list, and the bytes that replace it when a run continues."""


class Timeline:
    """Writer of Chrome trace events, one per line, for the page and any viewer of traces.

    A run that ends normally leaves valid JSON. A killed run leaves a list without its end, which
    viewers accept. Spans of a lane that overlap, such as groups on a generator, get rows of their
    own.

    Example:
        timeline = Timeline(Path("outputs/run/timeline.json"))
        with timeline.span("trainer", "train", step=3):
            ...
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._threads: dict[tuple[str, int], int] = {}
        self._taken: defaultdict[str, set[int]] = defaultdict(set)

    @contextmanager
    def span(self, lane: str, name: str, **details: Any) -> Iterator[None]:
        """Record how long the block takes, also if it fails."""
        if self._path is None:
            yield
            return
        taken = self._taken[lane]
        row = next(i for i in range(len(taken) + 1) if i not in taken)
        taken.add(row)
        # Wall-clock time: a resumed run continues on the same axis.
        started, since = time.time(), time.perf_counter()
        try:
            yield
        finally:
            taken.discard(row)
            self._write(
                name=name,
                ph="X",
                tid=self._thread_id(lane, row),
                ts=round(started * 1e6),
                dur=round((time.perf_counter() - since) * 1e6),
                args=details,
            )

    def close(self) -> None:
        """End the list and close the file; the next span reopens both."""
        if self._file is not None:
            # The last event has no comma after it. Earlier bytes stay: the page may be reading.
            name = {"name": "process_name", "ph": "M", "args": {"name": "torchtitan_rl"}}
            self._file.write(json.dumps({**name, "pid": os.getpid()}) + END)
            self._file.close()
            self._file = None
        self._threads.clear()

    def _thread_id(self, lane: str, row: int) -> int:
        self._rotate()
        if (thread := self._threads.get((lane, row))) is None:
            thread = self._threads[lane, row] = len(self._threads)
            name = f"{lane} ({row + 1})" if row else lane
            self._write(name="thread_name", ph="M", tid=thread, args={"name": name})
        return thread

    def _rotate(self) -> None:
        if self._file is not None and self._file.tell() > MOST_BYTES:
            self.close()
            assert self._path is not None
            self._path.replace(self._path.with_suffix(".old.json"))

    def _write(self, **event: Any) -> None:
        if self._file is None:
            assert self._path is not None
            _open_again(self._path)
            self._file = self._path.open("a", buffering=1)  # whole lines, whatever happens
            if not self._file.tell():
                self._file.write("[\n")
        self._file.write(json.dumps({**event, "pid": os.getpid()}) + ",\n")


def _open_again(path: Path) -> None:
    """Remove the end of a list that has one."""
    if not path.exists() or path.stat().st_size < len(END):
        return
    with path.open("r+b") as file:
        file.seek(-len(END), os.SEEK_END)
        if file.read() == END.encode():
            file.seek(-len(END), os.SEEK_END)
            file.write(NO_END.encode())
