"""The secret of a user's runs: a worker takes orders only from a controller that knows it.

Neither end sends it. Each sends a random number, and proves by a keyed hash of both numbers that it
knows the secret.
"""

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import Literal

from torchtitan_rl.core.errors import TorchtitanRLError

VARIABLE = "TORCHTITAN_RL_SECRET"
USUAL_FILE = Path("~/.config/torchtitan_rl/secret")
LEAST_LENGTH = 16

End = Literal["controller", "worker"]


class SecretError(TorchtitanRLError, ValueError):
    """A secret that is missing, weak, or that others can read."""


def load_secret(file: str | Path = "") -> str:
    """The secret from the environment or, if the variable is not set, from a file.

    The file is `USUAL_FILE` unless another is named; that one is made if it is not there, so hosts
    that share a home folder have one secret without further ado.
    """
    given = os.environ.get(VARIABLE, "")
    if given and not file:
        return _checked(given, f"the variable {VARIABLE}")
    path = Path(file or USUAL_FILE).expanduser()
    if not path.exists() and not file:
        _make(path)
    try:
        mode = path.stat().st_mode
        text = path.read_text().strip()
    except OSError as error:
        raise SecretError(
            f"the secret in {path} cannot be read ({error.strerror}): copy the file from the "
            f"controller's host, or set {VARIABLE} to the same text on all hosts"
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise SecretError(f"other users can read the secret in {path}: chmod 600 {path}")
    return _checked(text, str(path))


def new_secret() -> str:
    """A secret that nobody can guess."""
    return secrets.token_urlsafe(32)


def new_number() -> str:
    """A random number that one end sends to the other, to be part of the proof."""
    return secrets.token_hex(16)


def proof(secret: str, end: End, controllers: str, workers: str) -> str:
    """What an end sends to show that it knows the secret; the numbers are those of both ends."""
    text = f"torchtitan_rl {end} {controllers} {workers}".encode()
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()


def is_proof(given: object, secret: str, end: End, controllers: str, workers: str) -> bool:
    """Whether the other end knows the secret."""
    expected = proof(secret, end, controllers, workers)
    return isinstance(given, str) and hmac.compare_digest(given.encode(), expected.encode())


def _checked(text: str, where: str) -> str:
    if len(text) < LEAST_LENGTH:
        raise SecretError(
            f"the secret in {where} has {len(text)} characters; at least {LEAST_LENGTH} are "
            "needed, such as `openssl rand -hex 16` prints"
        )
    return text


def _make(path: Path) -> None:
    """Write a new secret that only this user can read; if another process is quicker, its counts.

    A file without a name becomes visible when it is complete.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as text:
            text.write(f"{new_secret()}\n")
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    except OSError as error:
        raise SecretError(
            f"no secret can be made in {path} ({error.strerror}): set {VARIABLE} to a text of at "
            f"least {LEAST_LENGTH} characters, the same on all hosts"
        ) from error
