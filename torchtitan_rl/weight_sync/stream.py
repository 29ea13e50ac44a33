"""Connections between relays: messages of JSON, then frames of bytes, each with a deadline.

Bytes go from a memory file to the socket, and from the socket to the memory of another file,
without being in Python's hands in between.
"""

import contextlib
import json
import os
import socket
import struct
from typing import Any

from torchtitan_rl.weight_sync.handle import WeightSyncError

_LENGTH = struct.Struct("!q")
"""Before a message, its bytes; before a frame, its bytes as well, 0 for a sign of life, or those of
an error's message, negative."""
_MOST_TOLD = 1 << 16
"""Most bytes of an error's message."""
_ACK = b"\x06"


class StreamError(WeightSyncError):
    """The other end of a connection has gone, hangs, or cannot be reached."""


class Stream:
    """One end of a connection. Whatever takes longer than its `seconds` raises StreamError."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection, self._seconds = connection, seconds
        # Deadlines by the kernel, and not by Python: that would poll before each call.
        connection.settimeout(None)
        deadline = struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, deadline)
        # What a host that has vanished does not acknowledge; else the kernel tries for minutes.
        milliseconds = max(1, int(1000 * seconds))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The size of its buffers is left to the kernel: it makes them grow with what is under way,
        # beyond the size that a program may set.

    # ---- messages -------------------------------------------------------------------------------

    def send_message(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        self._send(_LENGTH.pack(len(data)) + data)

    def receive_message(self, most: int) -> dict[str, Any]:
        """The next message, of at most so many bytes."""
        [length] = _LENGTH.unpack(self._receive(_LENGTH.size))
        if not 0 < length <= most:
            raise StreamError(f"the other end sends a message of {length} bytes, {most} at most")
        return self._message_of(length)

    def acknowledge(self) -> None:
        """Say that all bytes are here."""
        self._send(_ACK)

    def wait_for_acknowledgement(self) -> None:
        """Wait until the other end has all bytes: until then the kernel reads those that it has
        not sent yet from the memory that they are in."""
        if self._receive(len(_ACK)) != _ACK:
            raise StreamError("the other end does not say that it has all bytes")

    # ---- frames ---------------------------------------------------------------------------------

    def send_file(self, fd: int, position: int, nbytes: int) -> None:
        """Send a frame: bytes of a file."""
        self._send(_LENGTH.pack(nbytes), socket.MSG_MORE)
        end = position + nbytes
        while position < end:
            with self._explained("takes"):
                sent = os.sendfile(self._connection.fileno(), fd, position, end - position)
            if not sent:
                raise StreamError(f"the memory ends at byte {position}, before {end}")
            position += sent

    def send_sign_of_life(self) -> None:
        """Send an empty frame: the bytes will follow."""
        self._send(_LENGTH.pack(0))

    def send_error(self, kind: str, text: str) -> None:
        """Send, in place of a frame, why there will be no more."""
        data = json.dumps({"kind": kind, "text": text[: _MOST_TOLD // 8]}).encode()
        self._send(_LENGTH.pack(-len(data)) + data)

    def receive_frame(self) -> int | dict[str, Any]:
        """How many bytes come next, or the error that is sent in their place."""
        [length] = _LENGTH.unpack(self._receive(_LENGTH.size))
        if length >= 0:
            return length
        if -length > _MOST_TOLD:
            raise StreamError(f"the other end sends an error of {-length} bytes")
        return self._message_of(-length)

    def receive_into(self, memory: memoryview) -> int:
        """Fill memory with bytes of a frame; returns how many came within the deadline."""
        with self._explained("sends"):
            count = self._connection.recv_into(memory, 0, socket.MSG_WAITALL)
        if not count:
            raise StreamError("the other end has gone")
        return count

    # ---- both -----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Have the thread that uses this end get an error, whatever it waits for."""
        with contextlib.suppress(OSError):  # it is cut off already
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end. Only by the thread that uses it: under another one's hands the number of
        its descriptor may already be that of another file."""
        self._connection.close()

    def _message_of(self, length: int) -> dict[str, Any]:
        try:
            message = json.loads(self._receive(length))
        except ValueError as error:
            raise StreamError(f"the other end sends no JSON: {error}") from error
        if not isinstance(message, dict):
            raise StreamError("the other end sends no message")
        return message

    def _receive(self, count: int) -> bytes:
        data = bytearray(count)
        view, received = memoryview(data), 0
        while received < count:
            received += self.receive_into(view[received:])
        return bytes(data)

    def _send(self, data: bytes, flags: int = 0) -> None:
        with self._explained("takes"):
            self._connection.sendall(data, flags)

    @contextlib.contextmanager
    def _explained(self, does: str) -> Any:
        try:
            yield
        except BlockingIOError:
            raise StreamError(f"the other end {does} nothing for {self._seconds:g} s") from None
        except OSError as error:
            raise StreamError(f"the other end {does} nothing: {error}") from error


def connect(address: str, port: int, seconds: float) -> Stream:
    """A connection to whoever listens there."""
    try:
        return Stream(socket.create_connection((address, port), seconds), seconds)
    except OSError as error:
        raise StreamError(f"cannot be reached: {error}") from error
