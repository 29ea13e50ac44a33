"""Messages between a controller and a worker: lines of JSON over TCP.

Both ends notice when the other is silent: a host whose network is cut closes nothing.
"""

import asyncio
import contextlib
import json
import os
import socket
from typing import Any

from torchtitan_rl.core.errors import TorchtitanRLError

LONGEST, LONGEST_OF_STRANGERS = 64 << 20, 4096
"""Most bytes of a message: orders for weights list all tensors. Before the other end has proved
that it knows the secret, it may send no more than a few words."""
_CHUNK = 1 << 16
HANDSHAKE_SECONDS = 10.0
"""How long the other end may take for each message until it has proved that it knows the secret."""


class HostError(TorchtitanRLError, RuntimeError):
    """A host cannot be used, or what was asked of it failed; the message names it."""


class ClosedError(HostError):
    """The connection with a host has ended."""


def reason(error: OSError) -> str:
    """Why a connection failed, in the system's words; asyncio has words of its own.

    Example:
        >>> reason(ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 1)"))
        'Connection refused'
    """
    return os.strerror(error.errno) if error.errno else str(error)


class Messages:
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        connection = writer.get_extra_info("socket")
        # A message is not to wait until the one before it was acknowledged.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.longest = LONGEST_OF_STRANGERS
        """Most bytes of a message that is received."""
        self._received = bytearray()
        self.heard = asyncio.get_running_loop().time()
        """When the last message came."""

    @classmethod
    async def connect(cls, address: str, port: int, seconds: float) -> "Messages":
        """A connection to a worker."""
        try:
            connecting = asyncio.open_connection(address, port)
            return cls(*await asyncio.wait_for(connecting, seconds))
        except TimeoutError:
            raise ClosedError(f"no answer within {seconds:g} s") from None
        except OSError as error:
            raise ClosedError(reason(error)) from error

    @property
    def own_address(self) -> str:
        """Address of this end, by which the other one's host reaches it."""
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def other_address(self) -> str:
        """Address of the other end."""
        return str((self._writer.get_extra_info("peername") or ["?"])[0])

    def send(self, **message: Any) -> None:
        """Send a message; does not wait until it is through."""
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self, seconds: float | None = None) -> dict[str, Any]:
        """The next message; raises ClosedError if none comes in time, or what comes is none."""
        try:
            line = await asyncio.wait_for(self._line(), seconds)
        except TimeoutError:
            raise ClosedError(f"silent for {seconds:g} s") from None
        except OSError as error:
            raise ClosedError(reason(error)) from error
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise ClosedError("the other end does not speak as torchtitan_rl does")
        self.heard = asyncio.get_running_loop().time()
        return message

    async def _line(self) -> bytes:
        """What is received up to the next line break. Nothing is lost if this is cancelled."""
        searched = 0
        while (end := self._received.find(b"\n", searched)) < 0:
            searched = len(self._received)
            if searched > self.longest:
                raise ClosedError(f"the other end sends a message of over {self.longest} bytes")
            chunk = await self._reader.read(_CHUNK)
            if not chunk:
                raise ClosedError("the connection was closed")
            self._received += chunk
            self.heard = asyncio.get_running_loop().time()  # a long message may take its time
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def silent_for(self) -> float:
        """Seconds since the last message came."""
        return asyncio.get_running_loop().time() - self.heard

    async def close(self) -> None:
        """End the connection; what was sent before is sent on, for a moment."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), 1.0)

    def abort(self) -> None:
        """End the connection at once."""
        self._writer.transport.abort()
