"""Columns of a rollout that the index keeps, read from records that may be broken."""

import json
import math
import re
from typing import Any

from torchtitan_rl.rollout.record_schema import upgraded_split

COLUMNS = {
    "step": "INTEGER",
    "split": "TEXT",
    "task": "TEXT",
    "group": "TEXT",
    "sample": "INTEGER",
    "reward": "REAL",
    "correct": "INTEGER",
    "advantage": "REAL",
    "status": "TEXT",
    "turns": "INTEGER",
    "tokens": "INTEGER",
    "policy_version": "INTEGER",
    "seconds": "REAL",
}


def columns_of(record: dict[str, Any], file: str) -> tuple[Any, ...]:
    """The columns of a rollout, in the order of `COLUMNS`; None where the record has no such value.

    Example:
        >>> columns_of({"task": "spelling", "reward": 1, "step": "x"}, "step-000012.jsonl")[:6]
        (12, '', 'spelling', '', None, 1.0)
    """
    row: list[Any] = []
    for name, kind in COLUMNS.items():
        value = record.get(name)
        if name == "split":
            value = upgraded_split(value)
        if name == "seconds":
            parts = value.values() if isinstance(value, dict) else [value]
            row.append(_sum([number(part) for part in parts]))
        elif kind == "TEXT":
            row.append(text(value))
        else:
            found = number(value)
            whole = kind == "INTEGER" and found is not None
            row.append(int(found) if whole and found is not None else found)
    if row[0] is None:
        row[0] = step_of(file)
    return tuple(row)


def step_of(file: str) -> int | None:
    """The step in a file's name.

    Example:
        >>> step_of("step-000012-evaluation.jsonl")
        12
    """
    match = re.match(r"step-(\d{1,15})", file)
    return int(match[1]) if match else None


def number(value: Any) -> float | None:
    """A finite number that a 64-bit column can hold, or None."""
    if isinstance(value, bool | int | float) and abs(value) < 2**53 and math.isfinite(value):
        return float(value)
    return None


def text(value: Any) -> str:
    """Text of a value that can be encoded as UTF-8; a value that is no text, as JSON.

    Example:
        >>> text({"a": 1}), text(None), text("\\ud800")
        ('{"a": 1}', '', '\\\\ud800')
    """
    if value is None:
        return ""
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shown.encode("utf-8", "backslashreplace").decode()


def _sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
