"""Weight sync by process groups, the trainer's end: NCCL between GPUs, gloo between CPUs.

A reader connects to each trainer rank, and the two make a group. It asks for the pieces it needs of
a publication; the rank sends them from its buffer, which is not overwritten meanwhile. A thread per
reader does that beside the training step. When a reader dies or hangs, its thread drops the group,
and the buffer is free again.
"""

import atexit
import contextlib
import json
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtitan_rl.weight_sync.boxes import Box, Piece, common, cut, lay_out, slot_box, slot_tensor
from torchtitan_rl.weight_sync.control import Control
from torchtitan_rl.weight_sync.copying import checksum
from torchtitan_rl.weight_sync.handle import (
    Slot,
    StaleHandleError,
    WeightSyncError,
    WrongWeightsError,
)
from torchtitan_rl.weight_sync.pair import (
    TRAINER,
    LinkError,
    Pair,
    join,
    listening_store,
    transfer,
)
from torchtitan_rl.weight_sync.side_stream import SideStream

SECONDS = 60.0
"""Deadline of both ends for each answer and for each 64 MB."""

_END_SECONDS = 2.0
"""How long a thread that is sending may go on when the server is closed."""
_AGAIN_SECONDS = 1.0
"""How long a server that cannot accept a reader waits until it tries again."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CollectiveLocation:
    """Where a trainer rank answers readers of its snapshots."""

    address: str
    port: int
    token: str
    """A secret that comes with a handle: who does not have it is sent nothing."""
    device: str


@dataclass(slots=True, eq=False)
class Offer:
    """A publication that readers may ask for."""

    data: torch.Tensor
    number: int
    version: int
    slots: Sequence[Slot]
    readers: int = 0
    copies: dict[Any, Any] = field(default_factory=dict)
    """Copies that readers have in shared memory, by their host and what they asked for; None: one
    of them is receiving it."""

    def tensor(self, number: int) -> torch.Tensor:
        """The tensor of a slot."""
        return slot_tensor(self.data, self.slots[number])

    def check(self, pieces: Sequence[Piece], sizes: Sequence[int]) -> None:
        """Raise WrongWeightsError unless the pieces are there, and make messages of these sizes."""
        inside = all(
            0 <= piece.slot < len(self.slots)
            and len(piece.box.start) == len(self.slots[piece.slot].start)
            and (
                0 in piece.box.shape
                or common(slot_box(self.slots[piece.slot]), piece.box) == piece.box
            )
            for piece in pieces
        )
        if not inside or [m.nbytes for m in lay_out(self.slots, pieces)] != list(sizes):
            raise WrongWeightsError(
                f"policy version {self.version}: what a generator asks for is not what the "
                "trainer has; they disagree on the sizes of tensors"
            )

    def memory(self, pieces: Sequence[Piece]) -> Iterator[torch.Tensor]:
        """The messages by which the pieces are sent."""
        for message in lay_out(self.slots, pieces):
            if message.first is not None:
                yield self.data[message.first : message.first + message.nbytes]
                continue
            packed = torch.empty(message.nbytes, dtype=torch.uint8, device=self.data.device)
            for number, position in zip(message.pieces, message.positions, strict=True):
                piece = self.piece(pieces[number])
                nbytes = piece.numel() * piece.itemsize
                target = packed[position : position + nbytes].view(piece.dtype)
                target.view(piece.shape).copy_(piece)
            yield packed

    def piece(self, piece: Piece) -> torch.Tensor:
        """A view of a piece."""
        return cut(self.tensor(piece.slot), slot_box(self.slots[piece.slot]), piece.box)

    def checksums(self, pieces: Sequence[Piece], published: dict[str, int]) -> list[int]:
        """A checksum of each piece that is part of a slot with a published checksum; 0 for the
        others. Raises WrongWeightsError if the slot is not what was published."""
        right: set[int] = set()
        for number in {piece.slot for piece in pieces if str(piece.slot) in published}:
            whole = self.tensor(number).reshape(-1).view(torch.uint8)
            if checksum(whole) != published[str(number)]:
                raise WrongWeightsError(
                    f"policy version {self.version}: the bytes of {self.slots[number]} are not "
                    "those that the trainer published"
                )
            right.add(number)
        return [
            checksum(self.piece(piece).contiguous().view(-1).view(torch.uint8))
            if piece.slot in right
            else 0
            for piece in pieces
        ]


class Server:
    """Answers the readers of one trainer rank's snapshots.

    Everything that several threads change is changed under `_changed`.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        address: str = "127.0.0.1",
        seconds: float = SECONDS,
    ) -> None:
        self._device, self._address, self._seconds = device, address, seconds
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server((address, 0))
        self._changed = threading.Condition()
        self._offers: dict[int, Offer] = {}
        self._links: set[Control] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False
        # A thread that is in gloo as Python ends would abort the process.
        atexit.register(self.close)
        self._start(self._accept)

    @property
    def location(self) -> CollectiveLocation:
        """Where readers find what is offered."""
        port = self._listener.getsockname()[1]
        return CollectiveLocation(self._address, port, self._token, self._device.type)

    def offer(self, offer: Offer) -> None:
        """Let readers have a publication."""
        with self._changed:
            self._offers[offer.number] = offer

    def withdraw(self, offer: Offer | None, *, even_if_read: bool = False) -> bool:
        """Let no more readers have a publication. False: one is reading it, and it stays."""
        with self._changed:
            if offer is None or self._offers.get(offer.number) is not offer:
                return True
            if offer.readers and not even_if_read:
                return False
            del self._offers[offer.number]
            return True

    def close(self) -> None:
        """Answer nobody any more. Who is being sent something may get it to its end."""
        atexit.unregister(self.close)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            links, threads = list(self._links), list(self._threads)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits for readers
        self._listener.close()
        for link in links:
            link.close()
        for thread in threads:
            thread.join(_END_SECONDS)

    # ---- on threads of its own ------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                control = Control(connection, self._seconds)
            except OSError as error:
                with self._changed:
                    if self._closed:
                        return
                    _log.warning("cannot accept a reader of weights, will try again: %s", error)
                    self._changed.wait(_AGAIN_SECONDS)  # too many open files, for instance
                continue
            self._start(self._serve, control)

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, name="weights", daemon=True)
        with self._changed:
            self._threads = [other for other in self._threads if other.is_alive()] + [thread]
            thread.start()

    def _serve(self, control: Control) -> None:
        with self._changed:
            if self._closed:
                control.close()
            self._links.add(control)
        try:
            with contextlib.closing(self._join(control)) as pair:
                side = SideStream(self._device)
                while True:
                    ask = control.receive(for_ever=True)  # until the reader asks, or has gone
                    with side.after(side.mark()):
                        self._answer(control, pair, ask)
        except (WeightSyncError, OSError, ValueError, RuntimeError) as error:
            _log.info("the link to a reader has ended: %s", error)
        finally:
            with self._changed:
                self._links.discard(control)
            control.close()

    def _join(self, control: Control) -> Pair:
        """The group with a reader that knows the token."""
        hello = control.receive()
        if not secrets.compare_digest(hello.get("token", ""), self._token):
            raise LinkError("the reader does not know the token")
        store = listening_store(self._address, self._seconds)
        control.send(port=store.port)
        return join(store, TRAINER, self._device.type, address=self._address, seconds=self._seconds)

    def _answer(self, control: Control, pair: Pair, ask: dict[str, Any]) -> None:
        try:
            offer = self._take(ask["number"], ask["version"])
        except StaleHandleError as error:
            control.send(stale=str(error))
            return
        try:
            self._send(control, pair, offer, ask)
        except WrongWeightsError as error:
            control.send(wrong=str(error))
        finally:
            with self._changed:
                offer.readers -= 1

    def _take(self, number: int, version: int) -> Offer:
        """The publication, which stays as it is until its readers are done."""
        with self._changed:
            offer = self._offers.get(number)
            if offer is None:
                newest = max((held.version for held in self._offers.values()), default=None)
                now = "being written" if newest is None else f"version {newest}"
                raise StaleHandleError(
                    f"policy version {version} was overwritten: the newest is {now}; pull the "
                    "latest handle"
                )
            offer.readers += 1
            return offer

    def _send(self, control: Control, pair: Pair, offer: Offer, ask: dict[str, Any]) -> None:
        key = (ask["host"], json.dumps(ask["pieces"])) if ask["host"] else None
        copy = self._copy_of(offer, key, control)
        if copy is not None:
            control.send(**copy)
            return
        received: dict[str, Any] | None = None
        try:
            pieces = [
                Piece(n, Box(tuple(start), tuple(shape))) for n, start, shape in ask["pieces"]
            ]
            offer.check(pieces, ask["sizes"])
            checksums = offer.checksums(pieces, ask["checksums"])
            control.send(checksums=checksums)
            transfer(pair, offer.memory(pieces), sending=True)
            received = {**control.receive(), "checksums": checksums}
        finally:
            with self._changed:
                if key is not None and received is not None:
                    offer.copies[key] = received
                else:
                    offer.copies.pop(key, None)  # the next one that asks receives it
                self._changed.notify_all()

    def _copy_of(self, offer: Offer, key: Any, control: Control) -> Any:
        """Where a reader on the same host has what is asked for, when it has received it; None if
        whoever asks is to receive it."""
        if key is None:
            return None
        with self._changed:
            while key in offer.copies and not self._closed:
                if offer.copies[key] is not None:
                    return offer.copies[key]
                if not self._changed.wait(self._seconds / 4):
                    control.send(wait=True)
            offer.copies[key] = None
            return None


class CollectiveBuffer:
    """Memory for one snapshot, on the trainer's device."""

    def __init__(self, nbytes: int, server: Server, device: torch.device) -> None:
        self.data = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._server = server
        self._offer: Offer | None = None

    def reopen(self) -> bool:
        return self._server.withdraw(self._offer)

    def seal(self, number: int, version: int, slots: Sequence[Slot]) -> CollectiveLocation:
        self._offer = Offer(self.data, number, version, slots)
        self._server.offer(self._offer)
        return self._server.location

    def close(self) -> None:
        # Readers go on: they have what they asked for, or the thread that sends it has the memory.
        self._server.withdraw(self._offer, even_if_read=True)
