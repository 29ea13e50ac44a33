"""Index of the rollouts in a run's files, with the columns that the table sorts and filters by.

The index is an SQLite database in a temporary file. A thread makes it, one file of the run at a
time, the newest step first. Rollouts stay in their files and are read by their offset.
"""

import contextlib
import os
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_rl.view import spans
from torchtitan_rl.view.columns import COLUMNS, columns_of, number, text
from torchtitan_rl.view.lines import objects

_SCHEMA = f"""
CREATE TABLE files (
  id INTEGER PRIMARY KEY, run TEXT, kind TEXT, name TEXT, signature TEXT, broken INTEGER,
  UNIQUE (run, kind, name));
CREATE TABLE rollouts (
  file INTEGER, line INTEGER, offset INTEGER, length INTEGER, run TEXT,
  {", ".join(f'"{name}" {kind}' for name, kind in COLUMNS.items())},
  PRIMARY KEY (file, line)) WITHOUT ROWID;
CREATE INDEX rollouts_by_step ON rollouts (run, step DESC, file, line);
CREATE INDEX rollouts_by_group ON rollouts (run, "group");
CREATE TABLE exports (
  file INTEGER, line INTEGER, offset INTEGER, length INTEGER, run TEXT, step INTEGER, name TEXT,
  PRIMARY KEY (file, line)) WITHOUT ROWID;
CREATE INDEX exports_by_name ON exports (run, name);
{spans.SCHEMA}
"""
FACETS = ("task", "split", "status")
_FACETS = [(name, 5 + list(COLUMNS).index(name)) for name in FACETS]  # their place in a row
_MAX_FACETS = 200
_TABLES = {"rollouts": "rollouts", "tokens": "exports"}


@dataclass
class Progress:
    """State of the index of one run."""

    files: int = 0
    pending: int = 0
    version: int = 0
    """Counts changes, so that the page knows when to request the table again."""
    scanned: bool = False
    cursor: str = ""
    """Where the reading of the timeline stopped."""
    facets: dict[str, set[str]] = field(default_factory=lambda: {name: set() for name in FACETS})
    """Values that a filter can choose from, by column."""


class Index:
    """Index of the runs that the page has requested; other runs cost nothing.

    Example:
        index = Index({"run": Path("outputs/run")})
        index.start()
        index.add("run")
    """

    def __init__(self, runs: dict[str, Path], *, poll_seconds: float = 1.0) -> None:
        self._runs = runs
        self._poll_seconds = poll_seconds
        self._folder = tempfile.TemporaryDirectory(prefix="torchtitan_rl-view-")
        self._path = Path(self._folder.name) / "index.sqlite"
        self._wake, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="index", daemon=True)
        self.progress: dict[str, Progress] = {}
        self.error = ""
        with self.connect() as connection:
            connection.executescript("PRAGMA journal_mode=WAL;" + _SCHEMA)

    @contextlib.contextmanager
    def connect(self) -> Iterator[sqlite3.Connection]:
        """A database connection for the calling thread; committed when the block ends."""
        connection = sqlite3.connect(self._path, timeout=30)
        try:
            # An index that a crash has damaged is made again at the next start.
            connection.execute("PRAGMA synchronous=OFF")
            connection.row_factory = sqlite3.Row
            with connection:
                yield connection
        finally:
            connection.close()

    def start(self) -> None:
        """Start the thread that makes the index."""
        self._thread.start()

    def add(self, run: str) -> Progress:
        """Index a run from now on, and follow the files that it writes."""
        if run not in self.progress:
            self.progress[run] = Progress()
            self._wake.set()
        return self.progress[run]

    def close(self) -> None:
        """End the thread and remove the index."""
        self._closed.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._folder.cleanup()

    def broken(self, run: str) -> dict[str, int]:
        """How many lines could not be read, by kind of file."""
        with self.connect() as connection:
            rows = connection.execute(
                "SELECT kind, SUM(broken) FROM files WHERE run = ? GROUP BY kind", (run,)
            )
            return dict(rows.fetchall())

    def count(self, run: str) -> int:
        """How many rollouts of a run are indexed."""
        with self.connect() as connection:
            query = "SELECT COUNT(*) FROM rollouts WHERE run = ?"
            return connection.execute(query, (run,)).fetchone()[0]

    def _work(self) -> None:
        while not self._closed.is_set():
            self._wake.clear()
            errors = []
            for run in list(self.progress):
                try:
                    self.update(run)
                except Exception as error:  # such as a full disk or a removed folder
                    errors.append(f"{run}: {type(error).__name__}: {error}")
            self.error = "; ".join(errors)
            self._wake.wait(self._poll_seconds)

    def update(self, run: str) -> None:
        """Bring the index of a run up to date with its files."""
        progress = self.progress[run]
        with self.connect() as connection:
            stale = self._stale(connection, run, progress)
            progress.pending, progress.scanned = len(stale), True
            for kind, name, signature in stale:
                if self._closed.is_set():
                    return
                self._read(connection, run, kind, name, signature)
                connection.commit()
                progress.pending -= 1
                progress.version += 1
            # After the rollouts: a long timeline must not keep them waiting.
            folder = self._runs[run]
            while True:
                progress.cursor, more = spans.update(connection, run, folder, progress.cursor)
                connection.commit()
                if not more or self._closed.is_set():
                    return
                progress.version += 1

    def _stale(
        self, connection: sqlite3.Connection, run: str, progress: Progress
    ) -> list[tuple[str, str, str]]:
        """Files that are new or changed, the newest step first; removed files leave the index."""
        known = {
            (row["kind"], row["name"]): row["signature"]
            for row in connection.execute("SELECT * FROM files WHERE run = ?", (run,))
        }
        found = {
            (kind, name): signature
            for kind in _TABLES
            for name, signature in _signatures(self._runs[run] / kind)
        }
        progress.files = len(found)
        for kind, name in known.keys() - found.keys():
            self._forget(connection, run, kind, name)
            progress.version += 1
        connection.commit()
        stale = [(*key, mark) for key, mark in found.items() if known.get(key) != mark]
        return sorted(stale, key=lambda entry: entry[1], reverse=True)

    def _forget(self, connection: sqlite3.Connection, run: str, kind: str, name: str) -> None:
        where = (run, kind, name)
        file = "(SELECT id FROM files WHERE run = ? AND kind = ? AND name = ?)"
        connection.execute(f"DELETE FROM {_TABLES[kind]} WHERE file = {file}", where)
        connection.execute(f"DELETE FROM files WHERE id = {file}", where)

    def _read(
        self, connection: sqlite3.Connection, run: str, kind: str, name: str, signature: str
    ) -> None:
        """Index a file that is new, or that a resumed run has replaced."""
        self._forget(connection, run, kind, name)
        file = connection.execute(
            "INSERT INTO files (run, kind, name, signature) VALUES (?, ?, ?, ?)",
            (run, kind, name, signature),
        ).lastrowid
        columns = columns_of if kind == "rollouts" else _export_columns
        broken, rows = 0, []
        with contextlib.suppress(FileNotFoundError):  # gone again: the next round forgets it
            for line, (offset, length, record) in enumerate(objects(self._runs[run] / kind / name)):
                if record is None:
                    broken += 1
                else:
                    rows.append((file, line, offset, length, run, *columns(record, name)))
        if rows:
            marks = ", ".join("?" * len(rows[0]))
            connection.executemany(f"INSERT INTO {_TABLES[kind]} VALUES ({marks})", rows)
        if kind == "rollouts":
            for facet, place in _FACETS:
                values = self.progress[run].facets[facet]
                if len(values) < _MAX_FACETS:
                    values.update(row[place] for row in rows)
        connection.execute("UPDATE files SET broken = ? WHERE id = ?", (broken, file))


def _export_columns(record: dict[str, Any], _file: str) -> tuple[Any, ...]:
    return number(record.get("step")), text(record.get("name"))


def _signatures(folder: Path) -> Iterator[tuple[str, str]]:
    """Names of JSONL files, each with what changes when the file does."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".jsonl"):
                with contextlib.suppress(FileNotFoundError):
                    stat = entry.stat()
                    yield entry.name, f"{stat.st_ino} {stat.st_size} {stat.st_mtime_ns}"
