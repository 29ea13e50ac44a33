"""Reading files of JSON lines that may be long, broken, or still being written."""

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DECODER = json.JSONDecoder(parse_constant=lambda _: None)  # made once: there are many lines
CHECKED_BYTES = 256  # before a cursor: enough to notice that a file was replaced


def parse(line: bytes) -> dict[str, Any] | None:
    """The object of a line, or None if the line is no JSON object. NaN and Infinity become None.

    Example:
        >>> parse(b'{"reward": NaN}'), parse(b'{"reward": 1'), parse(b"[1]")
        ({'reward': None}, None, None)
    """
    try:
        value = _DECODER.decode(line.decode())
    except (ValueError, RecursionError):  # also bad UTF-8, or brackets nested too deep
        return None
    return value if isinstance(value, dict) else None


def objects(path: Path) -> Iterator[tuple[int, int, dict[str, Any] | None]]:
    """Offset, length and object of every line that is not empty; the object of a broken line is
    None."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield offset, len(line), parse(line)
            offset += len(line)


def line_at(path: Path, offset: int, length: int) -> bytes:
    """The line at an offset; empty if the file cannot be read."""
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            return file.read(length)
    except OSError:
        return b""


@dataclass(frozen=True, slots=True)
class Tail:
    """Lines of a file from a cursor on."""

    lines: list[bytes]
    cursor: str
    reset: bool
    """Whether `lines` are from the start again, because the file was replaced."""
    pending: bool
    """Whether an unfinished last line was left out."""


def tail(path: Path, cursor: str = "", max_bytes: int = 8 << 20) -> Tail:
    """Complete lines after `cursor`, at most `max_bytes` of them; an empty cursor is the start.

    A cursor is an offset and a checksum of the bytes before it. A file that was replaced, as by a
    resumed run, is read from its start again.
    """
    try:
        with path.open("rb") as file:
            offset = _offset(file, cursor)
            file.seek(offset)
            data = file.read(max_bytes)
            if b"\n" not in data and len(data) == max_bytes:
                data += file.readline()  # a line longer than that
            last = data[data.rfind(b"\n") + 1 :]
            at_end = not file.read(1)
            if last and not (at_end and parse(last.strip().rstrip(b",")) is not None):
                data = data[: len(data) - len(last)]
                pending = at_end
            else:
                pending = False
            end = offset + len(data)
            lines = [line for line in data.split(b"\n") if line.strip()]
            return Tail(lines, _cursor(file, end), bool(cursor) and offset == 0, pending)
    except FileNotFoundError:
        return Tail([], "", bool(cursor), False)


def _cursor(file: Any, offset: int) -> str:
    file.seek(max(0, offset - CHECKED_BYTES))
    checksum = zlib.crc32(file.read(min(offset, CHECKED_BYTES)))
    return f"{offset}-{checksum:08x}" if offset else ""


def _offset(file: Any, cursor: str) -> int:
    digits = cursor.partition("-")[0]
    offset = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 16 else 0
    whole = offset <= file.seek(0, os.SEEK_END) and _cursor(file, offset) == cursor
    return offset if whole else 0
