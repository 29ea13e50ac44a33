"""Filters, order and search of the table of rollouts."""

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.view.columns import COLUMNS, text
from torchtitan_rl.view.lines import parse

MAX_ROWS = 200
SEARCH_SECONDS = 1.0  # after so long a search returns what it has found, and how far it came

WITH_FILE = "SELECT rollouts.*, (SELECT name FROM files WHERE id = file) AS file_name FROM rollouts"

_EQUAL = ("task", "split", "status", "group")
_RANGES = {"step": "INTEGER", "reward": "REAL"}


class BadRequest(TorchtitanRLError, ValueError):
    """A request of the page is invalid; the message is shown to the user."""


@dataclass(frozen=True, slots=True)
class Query:
    """Selection of a run's rollouts: filters, order, and which page of them.

    Example:
        >>> Query.of({"run": "a", "task": "spelling", "reward_min": "0.5"}).where()
        ('run = ? AND "task" = ? AND "reward" >= ?', ['a', 'spelling', 0.5])
    """

    run: str
    equal: dict[str, str] = field(default_factory=dict)
    correct: bool | None = None
    low: dict[str, float] = field(default_factory=dict)
    high: dict[str, float] = field(default_factory=dict)
    text: str = ""
    sort: str = "step"
    descending: bool = True
    start: int = 0
    limit: int = 50

    @classmethod
    def of(cls, values: Mapping[str, str]) -> "Query":
        """A query from the parameters of a request; empty parameters are ignored."""
        given = {name: value for name, value in values.items() if value != ""}
        sort = given.get("sort", "step")
        if sort not in COLUMNS:
            raise BadRequest(f"rollouts cannot be sorted by {sort!r}")
        correct = given.get("correct")
        if correct not in (None, "true", "false"):
            raise BadRequest("correct can be true or false")
        return cls(
            run=given.get("run", ""),
            equal={name: given[name] for name in _EQUAL if name in given},
            correct=None if correct is None else correct == "true",
            low={n: _number(given, f"{n}_min") for n in _RANGES if f"{n}_min" in given},
            high={n: _number(given, f"{n}_max") for n in _RANGES if f"{n}_max" in given},
            text=given.get("text", ""),
            sort=sort,
            descending=given.get("order", "descending") == "descending",
            start=max(0, int(_number(given, "start", 0))),
            limit=min(MAX_ROWS, max(1, int(_number(given, "limit", 50)))),
        )

    def where(self) -> tuple[str, list[Any]]:
        """The filters as an SQL condition, and its values."""
        parts, values = ["run = ?"], [self.run]  # type: tuple[list[str], list[Any]]
        for name, value in self.equal.items():
            parts.append(f'"{name}" = ?')
            values.append(value)
        if self.correct is not None:
            parts.append("correct = ?")
            values.append(int(self.correct))
        for sign, limits in ((">=", self.low), ("<=", self.high)):
            for name, limit in limits.items():
                parts.append(f'"{name}" {sign} ?')
                values.append(limit)
        return " AND ".join(parts), values

    def order(self) -> str:
        """The order in SQL; ties follow the run's files, so that a group's samples stay
        together."""
        # NULLs come last. DESC does that by itself, and without NULLS LAST an index can be used.
        direction = "DESC" if self.descending else "ASC NULLS LAST"
        return f'"{self.sort}" {direction}, step DESC, file, line'


def _number(values: Mapping[str, str], name: str, default: float = 0.0) -> float:
    try:
        number = float(values.get(name, default))
    except ValueError:
        raise BadRequest(f"{name} must be a number, not {values[name]!r}") from None
    if not abs(number) < 2**53:
        raise BadRequest(f"{name} is too large")
    return number


Read = Callable[[sqlite3.Row], bytes]


def listing(connection: sqlite3.Connection, query: Query, read: Read) -> dict[str, Any]:
    """One page of the table: its rows, and where the next page starts (None: there is none).

    With a text to search for, rows are read from `start` on until the page is full or the time is
    up; `searched` is the number of the last row that was read.
    """
    connection.execute("BEGIN")  # all queries below see one state of the index
    where, values = query.where()
    [total] = connection.execute(f"SELECT COUNT(*) FROM rollouts WHERE {where}", values).fetchone()
    # Only keys are sorted; a whole row is fetched when it is read.
    keys = connection.execute(
        f"SELECT file, line FROM rollouts WHERE {where} ORDER BY {query.order()} LIMIT ? OFFSET ?",
        [*values, -1 if query.text else query.limit, query.start],
    )
    deadline = time.monotonic() + SEARCH_SECONDS
    rows, position = [], query.start
    for key in keys:
        position += 1
        row = connection.execute(f"{WITH_FILE} WHERE file = ? AND line = ?", tuple(key)).fetchone()
        line = read(row)
        if may_contain(line, query.text):
            record = parse(line) or {}
            if query.text == "" or contains(record, query.text):
                rows.append({**summary(row), **shown_texts(record)})
        if len(rows) == query.limit or (query.text and time.monotonic() > deadline):
            break
    following = position if position < total else None
    return {"rows": rows, "total": total, "next": following, "searched": position}


def summary(row: sqlite3.Row) -> dict[str, Any]:
    """A row of the index for the page; `key` identifies the rollout in later requests."""
    return {"key": f"{row['file_name']}:{row['line']}", **{name: row[name] for name in COLUMNS}}


def texts(record: dict[str, Any]) -> Iterator[str]:
    """All texts of a rollout that a search looks at: messages, expected answer, failure."""
    messages = record.get("messages")
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict):
            yield text(message.get("content"))
            yield text(message.get("tool_calls"))
    yield text(record.get("expected_answer"))
    yield text(record.get("failure"))


def may_contain(line: bytes, wanted: str) -> bool:
    """Whether a line has to be parsed: most searches are for words that JSON writes unchanged."""
    plain = wanted.isascii() and wanted.replace(" ", "").isalnum()
    return not plain or wanted.lower().encode() in line.lower()


def contains(record: dict[str, Any], wanted: str) -> bool:
    """Whether any text of a rollout contains `wanted`, in any case."""
    folded = wanted.casefold()
    return any(folded in said.casefold() for said in texts(record))


def shown_texts(record: dict[str, Any]) -> dict[str, str]:
    """Texts of a rollout that the table shows, cut off where a row would be too long."""
    return {
        "question": question(record),
        "preview": preview(record),
        "expected_answer": text(record.get("expected_answer"))[:200],
    }


def question(record: dict[str, Any], length: int = 200) -> str:
    """What the model was asked: the last message of the user before the model's first.

    Example:
        >>> question({"messages": [{"role": "system", "content": "Add."},
        ...                        {"role": "user", "content": "47 85"},
        ...                        {"role": "assistant", "content": "24"}]})
        '47 85'
    """
    messages = record.get("messages")
    prompt: list[dict[str, Any]] = []
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict):
            if message.get("role") == "assistant" and prompt:
                break
            prompt.append(message)
    by_user = [message for message in prompt if message.get("role") == "user"]
    return text((by_user or prompt)[-1].get("content"))[:length] if prompt else ""


def preview(record: dict[str, Any], length: int = 200) -> str:
    """The last message of the model, else the last message, else the failure.

    Example:
        >>> preview({"messages": [{"role": "user", "content": "47"}]})
        '47'
    """
    messages = record.get("messages")
    said = [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    by_model = [m for m in said if m.get("role") == "assistant"]
    for message in reversed(by_model or said):
        if shown := text(message.get("content")) or text(message.get("tool_calls")):
            return shown[:length]
    return text(record.get("failure"))[:length]
