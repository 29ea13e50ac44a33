"""The viewer's endpoints: each makes its response from the runs' files."""

import contextlib
import json
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.rollout.record_schema import upgraded
from torchtitan_rl.view import spans
from torchtitan_rl.view.columns import number, text
from torchtitan_rl.view.decode import Decoder
from torchtitan_rl.view.index import Index
from torchtitan_rl.view.lines import line_at, parse, tail
from torchtitan_rl.view.notes import NotesError, read_notes, write_notes
from torchtitan_rl.view.query import WITH_FILE, BadRequest, Query, listing, summary
from torchtitan_rl.view.runs import NotARun, find_runs
from torchtitan_rl.view.sequences import page_columns, segments
from torchtitan_rl.view.settings import settings_of


class NotFound(TorchtitanRLError, LookupError):
    """A run or a rollout does not exist, or not yet."""


class Viewer:
    """Runs, their index, and the endpoints that the page calls.

    Example:
        viewer = Viewer([Path("outputs/run")])
        viewer.status({"runs": "run"})
    """

    def __init__(self, folders: Sequence[Path], *, poll_seconds: float = 1.0) -> None:
        self._folders = list(folders)
        self._runs = find_runs(folders)
        self._decoders: dict[str, Decoder] = {}
        self._decoding = threading.Lock()
        self._saving = threading.Lock()
        self.index = Index(self._runs, poll_seconds=poll_seconds)
        self.endpoints = {
            "runs": self.runs,
            "status": self.status,
            "rollouts": self.rollouts,
            "rollout": self.rollout,
            "group": self.group,
            "timeline": self.timeline,
        }
        self.changes = {"notes": self.save_notes}

    def start(self) -> None:
        """Start indexing."""
        self.index.start()

    def close(self) -> None:
        """Stop indexing, and remove the index."""
        self.index.close()

    def runs(self, _values: Mapping[str, str]) -> dict[str, Any]:
        """All runs, and which to show first: the named ones, or the newest of a folder."""
        with contextlib.suppress(NotARun):  # a folder was removed: the runs known so far stay
            self._runs.update(find_runs(self._folders))
        named = {folder.resolve() for folder in self._folders}
        chosen = [name for name, folder in self._runs.items() if folder in named]
        return {"runs": list(self._runs), "chosen": chosen or list(self._runs)[:1]}

    def status(self, values: Mapping[str, str]) -> dict[str, Any]:
        """Metrics of a run since the cursor, and the state of its index."""
        run = self._run(values)
        folder, progress = self._runs[run], self.index.add(run)
        new = tail(folder / "metrics.jsonl", values.get("cursor", ""))
        rows = [parse(line) for line in new.lines]
        return {
            "run": run,
            "metrics": [row for row in rows if row is not None],
            "cursor": new.cursor,
            "reset": new.reset,
            "metrics_broken": rows.count(None),
            "metrics_pending": new.pending,
            "broken": self.index.broken(run),
            "rollouts": self.index.count(run),
            "files": progress.files,
            "files_pending": progress.pending,
            "scanned": progress.scanned,
            "version": progress.version,
            "error": self.index.error,
            "written": written(folder),
            **self._config(folder, values.get("config_version", "")),
            "notes": asdict(read_notes(folder)),
        }

    def save_notes(self, values: Mapping[str, str]) -> dict[str, Any]:
        """Save the notes on a run; returns them as they are then."""
        folder = self._runs[self._run(values)]
        try:
            with self._saving:  # two tabs must not both replace the same version
                return asdict(
                    write_notes(folder, values.get("text", ""), values.get("version", ""))
                )
        except NotesError as error:
            raise BadRequest(str(error)) from None

    def rollouts(self, values: Mapping[str, str]) -> dict[str, Any]:
        """One page of the table of rollouts."""
        run = self._run(values)
        query = Query.of({**values, "run": run})
        progress = self.index.add(run)
        with self.index.connect() as connection:
            page = listing(connection, query, lambda row: self._line(run, row))
        return {**page, "facets": {k: sorted(v - {""}) for k, v in progress.facets.items()}}

    def rollout(self, values: Mapping[str, str]) -> dict[str, Any]:
        """One rollout, with its decoded tokens and the other samples of its group."""
        run = self._run(values)
        self.index.add(run)
        file, _, line = values.get("key", "").rpartition(":")
        with self.index.connect() as connection:
            row = connection.execute(
                f"{WITH_FILE} WHERE run = ? AND file_name = ? AND line = ?", (run, file, line)
            ).fetchone()
            record = parse(self._line(run, row)) if row is not None else None
            if record is None:
                raise NotFound("this rollout is not in the run's files, or not indexed yet")
            record = upgraded(record)
            found = self._sequences(connection, run, row, record)
            samples = self._samples(connection, run, row["step"], row["group"])
        return {
            **summary(row),
            **_shown(record),
            "run": run,
            "sequences": found,
            "samples": samples,
            "problem": self._decoder(run).problem if found else "",
        }

    def group(self, values: Mapping[str, str]) -> dict[str, Any]:
        """Samples of a group at a step, or at the nearest step that has the group."""
        run = self._run(values)
        self.index.add(run)
        step, group = number(_float(values.get("step"))) or 0, values.get("group", "")
        with self.index.connect() as connection:
            nearest = connection.execute(
                'SELECT step FROM rollouts WHERE run = ? AND "group" = ? ORDER BY ABS(step - ?)',
                (run, group, step),
            ).fetchone()
            samples = self._samples(connection, run, nearest[0], group) if nearest else []
        return {"run": run, "samples": samples}

    def timeline(self, values: Mapping[str, str]) -> dict[str, Any]:
        """Spans of a run's timeline between two times."""
        run = self._run(values)
        self.index.add(run)
        with self.index.connect() as connection:
            start, end = _float(values.get("start")), _float(values.get("end"))
            return spans.window(connection, run, start, end)

    def _run(self, values: Mapping[str, str]) -> str:
        run = values.get("run", "")
        if run not in self._runs:
            raise NotFound(f"there is no run {run!r}")
        return run

    def _line(self, run: str, row: sqlite3.Row) -> bytes:
        path = self._runs[run] / "rollouts" / row["file_name"]
        return line_at(path, row["offset"], row["length"])

    def _samples(
        self, connection: sqlite3.Connection, run: str, step: int, group: str
    ) -> list[dict[str, Any]]:
        rows = connection.execute(
            f'{WITH_FILE} WHERE run = ? AND step = ? AND "group" = ? ORDER BY sample LIMIT 200',
            (run, step, group),
        )
        return [summary(row) for row in rows]

    def _sequences(
        self, connection: sqlite3.Connection, run: str, row: sqlite3.Row, record: dict[str, Any]
    ) -> list[dict[str, Any]]:
        sequences = record.get("sequences")
        messages = record.get("messages")
        found = []
        for i, sequence in enumerate(sequences if isinstance(sequences, list) else []):
            if not isinstance(sequence, dict):
                continue
            export = self._export(connection, run, row, f"{row['group']}/{row['sample']}/{i}")
            columns = page_columns(
                sequence, row["advantage"], export, trained=row["split"] == "train"
            )
            columns["segments"] = segments(columns, messages if isinstance(messages, list) else [])
            columns["text"] = self._decoder(run).pieces(columns["tokens"])
            found.append(columns)
        return found

    def _export(
        self, connection: sqlite3.Connection, run: str, row: sqlite3.Row, name: str
    ) -> dict[str, Any] | None:
        """The trainer's token export of a sequence, from the rollout's step."""
        at = connection.execute(
            "SELECT files.name, offset, length FROM exports JOIN files ON files.id = file "
            "WHERE exports.run = ? AND exports.name = ? AND step = ?",
            (run, name, row["step"]),
        ).fetchone()
        if at is None:
            return None
        return parse(line_at(self._runs[run] / "tokens" / at["name"], at["offset"], at["length"]))

    def _decoder(self, run: str) -> Decoder:
        with self._decoding:
            decoder = self._decoders.get(run)
            if decoder is None or decoder.problem:  # it may have been written since
                decoder = self._decoders[run] = Decoder(self._runs[run])
            return decoder

    def _config(self, folder: Path, known: str) -> dict[str, Any]:
        """The settings of a run, unless the page knows this version of them; a run that continues
        may change some."""
        path = folder / "config.json"
        try:
            version = str(path.stat().st_mtime_ns)
            if version == known:
                return {"config": None, "config_version": version}
            return {
                "config": settings_of(parse(path.read_bytes()) or {}),
                "config_version": version,
            }
        except OSError:
            return {"config": None, "config_version": ""}


def written(folder: Path) -> float | None:
    """Time of a run's last write, in seconds since 1970."""
    times = []
    for name in ("metrics.jsonl", "timeline.json", "rollouts", "config.json"):
        with contextlib.suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    return max(times, default=None)


def _shown(record: dict[str, Any]) -> dict[str, Any]:
    """Fields of a record that only the page of one rollout shows, as text: a browser would round
    large numbers."""
    messages = record.get("messages")
    return {
        "messages": [
            {key: text(value) for key, value in message.items()}
            for message in (messages if isinstance(messages, list) else [])
            if isinstance(message, dict)
        ],
        "expected_answer": text(record.get("expected_answer")),
        "failure": text(record.get("failure")),
        "temperature": number(record.get("temperature")),
        "newest_version": number(record.get("newest_version")),
        "tool_calls": [text(call) for call in record.get("tool_calls") or []],
        **{name: _texts(record.get(name)) for name in ("reward_parts", "state")},
        "parts": _texts(record.get("seconds")),
    }


def _texts(value: Any) -> dict[str, str]:
    return {str(k): text(v) for k, v in value.items()} if isinstance(value, dict) else {}


def _float(value: str | None) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        raise BadRequest(f"{value!r} is no number") from None


def to_json(value: Any) -> bytes:
    """Strict JSON of a value; a number that is not finite, such as 1e999 in a file, is null."""
    try:
        return json.dumps(value, allow_nan=False).encode()
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return number(value) if isinstance(value, float) else value
