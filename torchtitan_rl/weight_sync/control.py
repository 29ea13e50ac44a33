"""Messages between a reader and a trainer's rank: lines of JSON on a socket of their own.

The bytes of weights go another way. That the other end has died is seen here first: its socket is
closed.
"""

import contextlib
import json
import socket
from typing import Any

from torchtitan_rl.weight_sync.pair import LinkError


class Control:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        # A message is not to wait until the one before it was acknowledged.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanishes closes nothing.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._lines = connection.makefile("rw", encoding="utf-8")

    def say(self, **message: Any) -> None:
        """Send a message."""
        try:
            self._lines.write(json.dumps(message) + "\n")
            self._lines.flush()
        except (OSError, ValueError) as error:  # ValueError: we have closed it ourselves
            raise LinkError(f"the other end has gone: {error}") from error

    def hear(self, seconds: float | None = None) -> dict[str, Any]:
        """The next message; raises LinkError if the other end is gone or says nothing in time."""
        self._connection.settimeout(seconds)
        try:
            line = self._lines.readline()
        except (OSError, ValueError) as error:
            raise LinkError(f"the other end says nothing: {error}") from error
        finally:
            with contextlib.suppress(OSError):
                self._connection.settimeout(None)
        if not line.endswith("\n"):
            raise LinkError("the other end has gone")
        try:
            return json.loads(line)
        except ValueError as error:
            raise LinkError(f"the other end is none of ours: {error}") from error

    @property
    def is_closed(self) -> bool:
        """Whether the other end has gone; asked between messages."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._lines.close()
        self._connection.close()
