"""Spans of a run's timeline.json, a Chrome trace that may still be growing."""

import re
import sqlite3
from pathlib import Path
from typing import Any

from torchtitan_rl.view.columns import number, text
from torchtitan_rl.view.lines import parse, tail

SCHEMA = """
CREATE TABLE spans (run TEXT, pid TEXT, tid TEXT, name TEXT, ts REAL, dur REAL, step INTEGER);
CREATE INDEX spans_by_time ON spans (run, ts);
CREATE TABLE lanes (run TEXT, pid TEXT, tid TEXT, name TEXT, PRIMARY KEY (run, pid, tid));
"""
MAX_SPANS = 4000  # per window: more could not be distinguished on a screen


def update(connection: sqlite3.Connection, run: str, folder: Path, cursor: str) -> tuple[str, bool]:
    """Index the spans after a cursor; returns the next cursor and whether there were new lines."""
    new = tail(folder / "timeline.json", cursor)
    if new.reset:
        for table in ("spans", "lanes"):
            connection.execute(f"DELETE FROM {table} WHERE run = ?", (run,))
    spans, lanes = [], []
    for line in new.lines:
        event = parse(line.strip().strip(b"[],"))
        if event is None:  # only a bracket, or a line that a full disk has cut off
            continue
        where = (run, text(event.get("pid")), text(event.get("tid")))
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        if event.get("ph") == "X" and (start := number(event.get("ts"))) is not None:
            length = number(event.get("dur")) or 0.0
            step = number(args.get("step"))
            spans.append((*where, text(event.get("name")), start, length, step))
        elif event.get("ph") == "M" and event.get("name") == "thread_name":
            lanes.append((*where, text(args.get("name"))))
    connection.executemany("INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?, ?)", spans)
    connection.executemany("INSERT OR REPLACE INTO lanes VALUES (?, ?, ?, ?)", lanes)
    return new.cursor, bool(new.lines)


def window(
    connection: sqlite3.Connection, run: str, start: float | None, end: float | None
) -> dict[str, Any]:
    """The spans between two times, in seconds since the first span; None is no limit.

    If there are too many, the longest. A lane is all that one actor did; calls that overlap are in
    rows of their lane. A span has its lane and its row, name, start, length and step.

    Example:
        {"seconds": 12.5, "shown": 2, "total": 2,
         "lanes": [{"name": "generator 0", "rows": 32}, {"name": "trainer", "rows": 1}],
         "spans": [[0, 7, "generate", 0.0, 0.8, 12], [1, 0, "train", 0.8, 0.5, 12]]}
    """
    first, last = connection.execute(
        "SELECT MIN(ts), MAX(ts + dur) FROM spans WHERE run = ?", (run,)
    ).fetchone()
    if first is None:
        return {"seconds": 0, "lanes": [], "spans": [], "shown": 0, "total": 0}
    low = first if start is None else first + start * 1e6
    high = last if end is None else first + end * 1e6
    where, values = "run = ? AND ts <= ? AND ts + dur >= ?", (run, high, low)
    [total] = connection.execute(f"SELECT COUNT(*) FROM spans WHERE {where}", values).fetchone()
    rows = connection.execute(
        f"SELECT pid, tid, name, ts, dur, step FROM spans WHERE {where} ORDER BY dur DESC LIMIT ?",
        (*values, MAX_SPANS),
    ).fetchall()
    rows_of, lanes = _lanes(connection, run)
    spans = [
        [*rows_of[pid, tid], name, (ts - first) / 1e6, dur / 1e6, step]
        for pid, tid, name, ts, dur, step in rows
    ]
    return {
        "seconds": (last - first) / 1e6,
        "lanes": [{"name": name, "rows": count} for name, count in lanes.items()],
        "spans": spans,
        "shown": len(spans),
        "total": total,
    }


def _lanes(
    connection: sqlite3.Connection, run: str
) -> tuple[dict[tuple[str, str], tuple[int, int]], dict[str, int]]:
    """The lane and the row of each thread; and the rows of each lane, in the order that lanes
    first appear.

    A resumed run is another process with the same names: its threads continue the lanes.
    """
    names = {
        (pid, tid): name
        for pid, tid, name in connection.execute(
            "SELECT pid, tid, name FROM lanes WHERE run = ?", (run,)
        )
    }
    threads = connection.execute(
        "SELECT pid, tid FROM spans WHERE run = ? GROUP BY pid, tid ORDER BY MIN(ts)", (run,)
    )
    found: dict[tuple[str, str], tuple[int, int]] = {}
    lanes: dict[str, int] = {}
    for pid, tid in threads.fetchall():
        lane, row = lane_and_row(names.get((pid, tid)) or f"thread {tid}")
        lanes[lane] = max(lanes.get(lane, 0), row + 1)
        found[pid, tid] = (list(lanes).index(lane), row)
    return found, lanes


def lane_and_row(thread: str) -> tuple[str, int]:
    """The actor that a thread of the trace belongs to, and which of its rows the thread is.

    Example:
        >>> lane_and_row("generator 0"), lane_and_row("generator 0 (12)")
        (('generator 0', 0), ('generator 0', 11))
    """
    match = re.fullmatch(r"(.+) \(([1-9]\d{0,3})\)", thread, re.DOTALL)
    return (match[1], int(match[2]) - 1) if match else (thread, 0)
