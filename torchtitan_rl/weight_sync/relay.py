"""Weight sync between hosts: a relay on each has a copy for its host, and hands it on to the next.

A relay takes a publication from the relay of another host, and puts it in shared memory of its own
host, where generators read it like any `shm` snapshot. It hands on what it has while the rest is
still on its way: with hosts in a chain, each network card carries the weights once in and once out.
No torch is imported.

Example:
    On the trainer's host, on the next one, and for a third::

        first, second = Relay("10.0.0.1"), Relay("10.0.0.2")
        source = {**first.location, "location": [pid, fd, size, token]}  # the trainer's snapshot
        here = second.fetch({..., "source": source})
        source = {**second.location, "location": None}  # what the second relay has
"""

import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from torchtitan_rl.weight_sync.copies import Copies, Copy, copy_bytes
from torchtitan_rl.weight_sync.handle import StaleHandleError, WeightSyncError
from torchtitan_rl.weight_sync.memory_file import HEADER_BYTES, OpenMemoryFile, ShmLocation
from torchtitan_rl.weight_sync.ranges import Incoming, Range, changed_ranges
from torchtitan_rl.weight_sync.stream import Stream, StreamError, connect

FRAME = 1 << 20
"""Most bytes handed on at once: what a relay waits for before it passes them on."""
_TOKEN_BYTES, _REQUEST_BYTES = 1 << 10, 1 << 26
"""Most bytes of what a reader sends, before its token is known to be right and after it."""
_log = logging.getLogger(__name__)


class SourceError(WeightSyncError):
    """The host that weights should have come from has gone, hangs, or does not have them: another
    host may have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a relay gets a publication."""

    address: str
    port: int
    token: str
    location: Sequence[int] | None
    """The memory file on the source's host that has it; None: the source relay's own copy."""
    attempt: int = 0
    """The `attempt` of the source relay's own order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a relay is to fetch: one trainer rank's part of a publication."""

    publisher: int
    number: int
    """Count of the publisher's publications."""
    version: int
    size: int
    """Bytes of the data."""
    slots: Sequence[tuple[int, int, int]]
    """Offset, bytes, and the number of the publication that last changed them; ascending."""
    source: Source
    attempt: int = 0
    """Differs between orders for the same publication: who waits for a later one is not told that
    an earlier one failed."""
    publishers: Sequence[int] = ()
    """The trainer's ranks of now; copies of others are dropped. Empty: none is."""

    @classmethod
    def parse(cls, order: dict[str, Any]) -> "Order":
        """An order as JSON has it."""
        return cls(**{**order, "source": Source(**order["source"])})


class Relay:
    """The copies of one host, and the server that hands them on. `seconds` is how long the other
    end of a transfer may do nothing."""

    def __init__(self, address: str, *, seconds: float = 60.0) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self._address, self._port = address, self._listener.getsockname()[1]
        self._token, self._seconds = secrets.token_hex(16), seconds
        self._copies = Copies()
        self._changed = threading.Lock()
        self._streams: set[Stream] = set()
        self._closing = threading.Event()
        self.sent = self.received = 0
        """Bytes of weights."""
        self._server = threading.Thread(target=self._accept, name="relay", daemon=True)
        self._server.start()

    @property
    def location(self) -> dict[str, Any]:
        """What others need to fetch from this relay."""
        return {"address": self._address, "port": self._port, "token": self._token}

    def close(self) -> None:
        """End all transfers and drop the copies; readers that have them open go on."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # to close it would not wake its thread
        self._server.join()
        self._listener.close()
        with self._changed:
            streams = list(self._streams)
        for stream in streams:
            stream.stop()
        self._copies.close()

    # ---- fetching -------------------------------------------------------------------------------

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """What came of an order, as JSON can have it; `location_in` reads it."""
        try:
            return {"location": self.fetch(order)}
        except WeightSyncError as error:
            return {"error": _kind(error), "text": str(error)}

    def fetch(self, order: dict[str, Any]) -> list[int]:
        """Get a publication, unless it is here; returns the ShmLocation of this host's copy.

        Raises SourceError if its source does not have it, StaleHandleError if it was overwritten.
        """
        wanted = Order.parse(order)
        if wanted.publishers:
            self._copies.keep(wanted.publishers)
        with self._copies.turn(wanted.publisher):
            location = self._copies.whole(wanted.publisher, wanted.number)
            try:
                return list(astuple(location or self._fetch(wanted)))
            except OSError as error:
                raise WeightSyncError(
                    f"this host has no memory for policy version {wanted.version}: {error}"
                ) from error

    def _fetch(self, wanted: Order) -> ShmLocation:
        name = wanted.publisher, wanted.number, wanted.size, wanted.attempt
        with self._copies.begun(*name) as (copy, base, held):
            if base is not None:
                for first, last in changed_ranges(wanted.slots, after=held, until=base.number):
                    copy_bytes(copy, base, first, last)
                held = max(held, base.number)
            ranges = changed_ranges(wanted.slots, after=held)
            incoming = Incoming(ranges, wanted.size)
            if ranges and ranges[-1][1] > wanted.size:
                raise WeightSyncError(f"slots end at byte {ranges[-1][1]} of {wanted.size}")
            self._copies.advance(copy, incoming.valid)
            if incoming.space is not None:
                self._fetch_from(wanted, ranges, incoming, copy)
            return self._copies.finish(copy, wanted.version)

    def _fetch_from(
        self, wanted: Order, ranges: Sequence[Range], incoming: Incoming, copy: Copy
    ) -> None:
        source = wanted.source
        try:
            stream = self._opened(connect(source.address, source.port, self._seconds))
            try:
                self._ask(stream, wanted, ranges)
                self._receive(stream, wanted, incoming, copy)
            finally:
                self._ended(stream)
        except StreamError as error:
            raise SourceError(
                f"policy version {wanted.version} could not be received from "
                f"{source.address}:{source.port}: {error}. Is that host alive?"
            ) from error

    def _ask(self, stream: Stream, wanted: Order, ranges: Sequence[Range]) -> None:
        stream.send_message({"token": wanted.source.token})
        stream.send_message(
            {
                "publisher": wanted.publisher,
                "number": wanted.number,
                "version": wanted.version,
                "size": wanted.size,
                "attempt": wanted.source.attempt,
                "location": wanted.source.location,
                "ranges": ranges,
            }
        )

    def _receive(self, stream: Stream, wanted: Order, incoming: Incoming, copy: Copy) -> None:
        # A source that waits itself says that it is alive, and in the end why nothing comes. Two
        # that wait for each other would say so for ever.
        since = time.monotonic()
        while incoming.space is not None:
            match stream.receive_frame():
                case 0:
                    if time.monotonic() - since > 2 * self._seconds:
                        raise StreamError(f"no bytes came for {2 * self._seconds:g} s")
                case int(nbytes):
                    self._receive_frame(stream, nbytes, incoming, copy)
                    since = time.monotonic()
                case error:
                    raise _told(error, wanted)
        stream.acknowledge()

    def _receive_frame(self, stream: Stream, nbytes: int, incoming: Incoming, copy: Copy) -> None:
        first, last = incoming.space or (0, 0)
        if nbytes > last - first:
            raise StreamError(f"it sends {nbytes} bytes, and {last - first} are wanted")
        end = first + nbytes
        while first < end:
            count = stream.receive_into(copy.data[first : min(end, first + FRAME)])
            incoming.take(count)
            first += count
            self._copies.advance(copy, incoming.valid)
            self._count(received=count)

    # ---- handing on -----------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set():  # too many open files, say
                    _log.warning("the relay cannot take a connection: %s", error)
                    self._closing.wait(0.1)
                continue
            try:
                stream = self._opened(Stream(connection, self._seconds))
                serve = threading.Thread(
                    target=self._serve, args=(stream,), name="relay-out", daemon=True
                )
                serve.start()
            except (OSError, RuntimeError) as error:  # it has gone, or there are too many threads
                _log.warning("the relay cannot serve a connection: %s", error)
                connection.close()

    def _serve(self, stream: Stream) -> None:
        try:
            given = str(stream.receive_message(_TOKEN_BYTES).get("token"))
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                _log.warning("the relay has refused a reader with a wrong token")
                return
            self._hand_on(stream, stream.receive_message(_REQUEST_BYTES))
        except StreamError as error:
            _log.info("a reader of the relay has gone: %s", error)
        except Exception:
            _log.exception("the relay could not answer a reader")
        finally:
            self._ended(stream)

    def _hand_on(self, stream: Stream, asked: dict[str, Any]) -> None:
        try:
            if asked["location"] is None:
                self._hand_on_copy(stream, asked)
            else:
                self._hand_on_file(stream, asked)
        except StreamError:
            raise
        except WeightSyncError as error:
            stream.send_error(_kind(error), str(error))

    def _hand_on_file(self, stream: Stream, asked: dict[str, Any]) -> None:
        """Send a memory file of a process of this host, which cannot overwrite it meanwhile."""
        location = ShmLocation(*asked["location"])
        _check(asked["ranges"], asked["size"], location.size - HEADER_BYTES)
        file = OpenMemoryFile(location)
        try:
            file.lock(asked["number"], asked["version"])
            self._send(stream, file.fd, asked["ranges"], lambda _end: None)
        finally:
            file.close()

    def _hand_on_copy(self, stream: Stream, asked: dict[str, Any]) -> None:
        """Send a copy of this relay's, also while it is received."""
        copy = self._find(stream, asked)

        def wait_for(end: int) -> None:
            self._wait(stream, lambda: copy.valid >= end or bool(copy.error))
            if copy.valid < end:
                raise WeightSyncError(copy.error)

        try:
            _check(asked["ranges"], asked["size"], copy.size)
            self._send(stream, copy.file.fd, asked["ranges"], wait_for)
        finally:
            self._copies.release(copy)

    def _find(self, stream: Stream, asked: dict[str, Any]) -> Copy:
        """The copy that is asked for; all hosts get their orders at once, so that the one for this
        host may come last."""
        found: list[Copy] = []

        def find() -> bool:
            copy = self._copies.find(asked["publisher"], asked["number"], asked["attempt"])
            found.extend([copy] if copy else [])
            return bool(found)

        if not self._wait(stream, find, self._seconds):
            raise WeightSyncError(
                f"it has had no order for policy version {asked['version']} for {self._seconds:g} s"
            )
        return found[0]

    def _wait(
        self, stream: Stream, ready: Callable[[], bool], seconds: float | None = None
    ) -> bool:
        """Wait for a condition of the copies, and tell the reader meanwhile that there is someone.
        Without `seconds`, it must be one that a transfer fulfils as it ends."""
        end = None if seconds is None else time.monotonic() + seconds
        while not self._copies.wait(ready, min(1.0, self._seconds / 4)):
            if end is not None and time.monotonic() > end:
                return False
            stream.send_sign_of_life()
        return True

    def _send(
        self, stream: Stream, fd: int, ranges: Sequence[Range], wait_for: Callable[[int], None]
    ) -> None:
        for first, last in ranges:
            for start in range(first, last, FRAME):
                end = min(last, start + FRAME)
                wait_for(end)
                stream.send_file(fd, HEADER_BYTES + start, end - start)
                self._count(sent=end - start)
        # What was sent may still be on this host, and is read from the file as it leaves.
        stream.wait_for_acknowledgement()

    # ---- both -----------------------------------------------------------------------------------

    def _opened(self, stream: Stream) -> Stream:
        with self._changed:
            self._streams.add(stream)
        if self._closing.is_set():
            stream.stop()
        return stream

    def _ended(self, stream: Stream) -> None:
        with self._changed:
            self._streams.discard(stream)
        stream.close()

    def _count(self, *, sent: int = 0, received: int = 0) -> None:
        with self._changed:
            self.sent += sent
            self.received += received


def location_in(answer: dict[str, Any]) -> list[int]:
    """The location in an answer of `Relay.answer`; raises its error."""
    if "error" in answer:
        raise _ERRORS.get(answer["error"], WeightSyncError)(answer["text"])
    return answer["location"]


_ERRORS: dict[str, type[WeightSyncError]] = {
    "stale": StaleHandleError,
    "source": SourceError,
    "other": WeightSyncError,
}


def _kind(error: WeightSyncError) -> str:
    return next(kind for kind, known in _ERRORS.items() if isinstance(error, known))


def _told(error: dict[str, Any], wanted: Order) -> WeightSyncError:
    """What a source says about weights that it cannot hand on."""
    text, source = str(error.get("text")), wanted.source
    if error.get("kind") == "stale":
        return StaleHandleError(text)
    return SourceError(
        f"{source.address}:{source.port} cannot hand on policy version {wanted.version}: {text}"
    )


def _check(ranges: Sequence[Range], size: int, actual: int) -> None:
    """Raise WeightSyncError unless ranges of what was asked for lie in the data that is here."""
    if size != actual:
        raise WeightSyncError(f"the weights have {actual} bytes here, {size} were asked for")
    end = 0
    for first, last in ranges:
        if not end <= first < last <= size:
            raise WeightSyncError(f"bytes {first} to {last} of {size} cannot be asked for")
        end = last
