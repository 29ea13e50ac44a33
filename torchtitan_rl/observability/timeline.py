"""What was waited for, and when: spans on one time axis, so that a stall is seen at a glance."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

MOST_BYTES = 64 << 20
"""A larger file becomes `timeline.old.json`, in the place of the one before it."""


END, NO_END = "\n]\n", " ,\n"
"""The end of the list, and what takes its place, byte for byte, when a run goes on."""


class Timeline:
    """Chrome trace events, a line each: the page shows them, and so does any viewer of traces.

    A run that ends in order leaves valid JSON. One that is killed leaves a list without its end,
    which viewers take as it is. Spans of a lane
    that overlap, such as groups on a generator, get rows of their own.

    Example:
        timeline = Timeline(Path("outputs/run/timeline.json"))
        with timeline.span("trainer", "train", step=3):
            ...
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._rows: dict[tuple[str, int], int] = {}
        self._taken: defaultdict[str, set[int]] = defaultdict(set)

    @contextmanager
    def span(self, lane: str, name: str, **details: Any) -> Iterator[None]:
        """Note how long the block takes, also if it fails."""
        if self._path is None:
            yield
            return
        taken = self._taken[lane]
        place = next(i for i in range(len(taken) + 1) if i not in taken)
        taken.add(place)
        # The clock of the wall: a run that is resumed goes on on the same axis.
        started, since = time.time(), time.perf_counter()
        try:
            yield
        finally:
            taken.discard(place)
            self._write(
                name=name,
                ph="X",
                tid=self._row(lane, place),
                ts=round(started * 1e6),
                dur=round((time.perf_counter() - since) * 1e6),
                args=details,
            )

    def close(self) -> None:
        """End the list and close the file; the next span opens both again."""
        if self._file is not None:
            # An event without a comma behind it. What is there stays as it is: the page may be
            # reading along.
            name = {"name": "process_name", "ph": "M", "args": {"name": "torchtitan_rl"}}
            self._file.write(json.dumps({**name, "pid": os.getpid()}) + END)
            self._file.close()
            self._file = None
        self._rows.clear()

    def _row(self, lane: str, place: int) -> int:
        self._rotate()
        if (row := self._rows.get((lane, place))) is None:
            row = self._rows[lane, place] = len(self._rows)
            name = f"{lane} ({place + 1})" if place else lane
            self._write(name="thread_name", ph="M", tid=row, args={"name": name})
        return row

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
    """Take the end off a list that has one."""
    if not path.exists() or path.stat().st_size < len(END):
        return
    with path.open("r+b") as file:
        file.seek(-len(END), os.SEEK_END)
        if file.read() == END.encode():
            file.seek(-len(END), os.SEEK_END)
            file.write(NO_END.encode())
