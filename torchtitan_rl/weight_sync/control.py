"""Messages between a reader and a trainer's rank: lines of JSON on a socket of their own.

The bytes of weights go another way. That the other end has died is seen here first: its socket is
closed.
"""

import contextlib
import json
import select
import socket
from typing import Any

from torchtitan_rl.weight_sync.pair import LinkError


class Control:
    """One end of a connection."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        """`seconds`: how long to wait for the other end to take or send a message."""
        self._connection, self._seconds = connection, seconds
        # A message is not to wait until the one before it was acknowledged.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanishes closes nothing.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._lines = connection.makefile("rw", encoding="utf-8")

    def send(self, **message: Any) -> None:
        """Send a message; raises LinkError if the other end is gone or does not take it in time."""
        try:
            self._connection.settimeout(self._seconds)
            self._lines.write(json.dumps(message) + "\n")
            self._lines.flush()
        except (OSError, ValueError) as error:  # ValueError: this end was closed meanwhile
            raise LinkError(f"the other end takes no message: {error}") from error

    def receive(self, *, for_ever: bool = False) -> dict[str, Any]:
        """The next message; raises LinkError if the other end is gone or sends none in time."""
        try:
            self._connection.settimeout(None if for_ever else self._seconds)
            line = self._lines.readline()
        except (OSError, ValueError) as error:
            raise LinkError(f"the other end sends no message: {error}") from error
        if not line.endswith("\n"):
            raise LinkError("the other end has gone")
        try:
            return json.loads(line)
        except ValueError as error:
            raise LinkError(f"the other end sends no JSON: {error}") from error

    @property
    def is_closed(self) -> bool:
        """Whether the other end has gone; asked between messages."""
        incoming = select.poll()
        try:
            incoming.register(self._connection, select.POLLIN)
            return bool(incoming.poll(0)) and not self._connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):  # ValueError: closed at this end
            return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._lines.close()
        self._connection.close()
