"""Notes on a run: text that the user writes on the page, kept in the run's folder."""

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.core.errors import TorchtitanRLError

FILE = "notes.md"
MAX_BYTES = 20_000


class NotesError(TorchtitanRLError, ValueError):
    """Notes cannot be saved; the message is shown to the user."""


@dataclass(frozen=True, slots=True)
class Notes:
    """Notes on a run, as they are on disk."""

    text: str = ""
    version: str = ""
    """Changes with the text: whoever saves names the version that the changes were made to."""
    problem: str = ""
    """Why the page must not change the file; empty: it may."""


def read_notes(folder: Path) -> Notes:
    """The notes on the run in `folder`; empty if there are none.

    A file that the page cannot hold as it is, because it is too long or no UTF-8, is shown and
    never overwritten.
    """
    try:
        with (folder / FILE).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return Notes()
    except OSError as error:
        return Notes(problem=f"{FILE} cannot be read: {error.strerror}")
    version = hashlib.sha256(data).hexdigest()[:16]
    if len(data) > MAX_BYTES:
        shown = data[:MAX_BYTES].decode("utf-8", "replace")
        return Notes(shown, version, f"{FILE} is longer than {MAX_BYTES} bytes: use an editor")
    try:
        return Notes(data.decode(), version)
    except UnicodeDecodeError:
        shown = data.decode("utf-8", "replace")
        return Notes(shown, version, f"{FILE} is no UTF-8: use an editor")


def write_notes(folder: Path, text: str, version: str) -> Notes:
    """Replace the notes on the run in `folder`; an empty text removes them.

    Raises:
        NotesError: the notes are no longer those of `version`, `text` is too long, or the folder
            cannot be written to.
    """
    before = read_notes(folder)
    if before.problem:
        raise NotesError(before.problem)
    if before.version != version:
        raise NotesError(f"{FILE} has changed since you opened it: copy your text, then reload")
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise NotesError("notes must be valid Unicode text") from None
    if len(data) > MAX_BYTES:
        raise NotesError(f"notes can have {MAX_BYTES} bytes, and these have {len(data)}")
    try:
        _replace(folder, data)
    except OSError as error:
        raise NotesError(f"{FILE} cannot be written: {error.strerror}") from None
    return read_notes(folder)


def _replace(folder: Path, data: bytes) -> None:
    """Write the file whole or not at all."""
    if not data.strip():
        (folder / FILE).unlink(missing_ok=True)
        return
    # A new file: a link of that name in somebody's run must not lead the write elsewhere.
    temporary = folder / f".notes-{secrets.token_hex(8)}"
    try:
        with temporary.open("xb") as file:
            file.write(data)
        temporary.replace(folder / FILE)
    finally:
        temporary.unlink(missing_ok=True)
