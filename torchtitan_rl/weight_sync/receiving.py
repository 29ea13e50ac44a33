"""Weight sync by process groups, the reader's end.

What is received lies in memory of its own until it is loaded. On a CPU that is shared memory: other
readers on this host that want the same take it from there, and nothing is sent twice.
"""

import atexit
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

from torchtitan_rl.platform import machine_id
from torchtitan_rl.weight_sync.boxes import (
    Box,
    Message,
    Piece,
    common,
    lay_out,
    place,
    slot_box,
    slot_tensor,
)
from torchtitan_rl.weight_sync.collective import SECONDS, CollectiveLocation
from torchtitan_rl.weight_sync.control import Control
from torchtitan_rl.weight_sync.handle import (
    Part,
    Slot,
    StaleHandleError,
    WeightSyncError,
    WrongWeightsError,
)
from torchtitan_rl.weight_sync.memory_file import ShmLocation
from torchtitan_rl.weight_sync.pair import (
    READER,
    LinkError,
    Pair,
    connected_store,
    join,
    transfer,
)
from torchtitan_rl.weight_sync.shm import ShmBuffer, ShmReader
from torchtitan_rl.weight_sync.side_stream import SideStream


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a reader needs of a snapshot, and where. Transports whose bytes do not travel take no
    notice."""

    names: frozenset[str] | None = None
    """Tensors that it will read; None: all."""
    boxes: Mapping[str, Sequence[Box]] | None = None
    """Boxes that it will read, by tensor; None: whole tensors."""
    device: torch.device | None = None
    """None: this process's current device of the kind that the trainer has."""

    def pieces(self, slots: Sequence[Slot]) -> list[Piece]:
        """What it needs of one trainer rank's slots."""
        pieces: dict[Piece, None] = {}
        for number, slot in enumerate(slots):
            if self.names is not None and slot.name not in self.names:
                continue
            if self.boxes is None:
                pieces[Piece(number, slot_box(slot))] = None
                continue
            for box in self.boxes.get(slot.name, ()):
                if (part := common(slot_box(slot), box)) is not None:
                    pieces[Piece(number, part)] = None
        return list(pieces)


class CollectiveReader:
    """What was received of one trainer rank's part."""

    def __init__(self, part: Part, version: int, wanted: Wanted) -> None:
        self._part, pieces = part, wanted.pieces(part.slots)
        self._numbers = {piece: number for number, piece in enumerate(pieces)}
        self._held = _receive(part, version, pieces, wanted.device)
        self.received = self._held.received

    def tensor_of(self, number: int) -> torch.Tensor:
        return self.box_of(number, slot_box(self._part.slots[number]))

    def box_of(self, number: int, box: Box) -> torch.Tensor:
        return self._held.tensor_of(self._numbers[Piece(number, box)])

    def checked(self, number: int) -> list[tuple[torch.Tensor, int]]:
        """The pieces of a slot, and their checksums: part of a slot has one that the trainer's rank
        computed as it sent it, when the whole slot was right."""
        slot, found = self._part.slots[number], []
        for piece, index in self._numbers.items():
            if piece.slot == number:
                whole = piece.box == slot_box(slot)
                sums = self._part.checksums[number] if whole else self._held.checksums[index]
                found.append((self._held.tensor_of(index), sums))
        return found

    def close(self) -> None:
        self._held.close()


# ---- where received pieces lie -------------------------------------------------------------------


class Held:
    """Received pieces of a part, in the order they were asked for."""

    checksums: Sequence[int] = ()
    """By piece; of pieces that are whole slots, 0."""
    received = 0
    """Bytes that were sent for them."""

    def tensor_of(self, number: int) -> torch.Tensor:
        raise NotImplementedError

    def close(self) -> None: ...


class _Shared(Held):
    """Pieces in shared memory, which this process or another one on this host has received."""

    def __init__(self, part: Part, version: int) -> None:
        self._reader = ShmReader(part, version)

    def tensor_of(self, number: int) -> torch.Tensor:
        return self._reader.tensor_of(number)

    def close(self) -> None:
        self._reader.close()


class _OnDevice(Held):
    """Pieces in memory of this process's device."""

    def __init__(self, data: torch.Tensor, slots: Sequence[Slot]) -> None:
        self._tensors = [slot_tensor(data, slot) for slot in slots]

    def tensor_of(self, number: int) -> torch.Tensor:
        return self._tensors[number]

    def close(self) -> None:
        self._tensors.clear()


# ---- links ---------------------------------------------------------------------------------------


Bounds = Sequence[tuple[int, int]]
"""First byte of each message in the memory that it is received in, and the one after its last."""


class CopyGoneError(WeightSyncError):
    """The reader that had received the same has given it up."""


class Link:
    """The connection of this process with one trainer rank; one publication at a time."""

    def __init__(
        self, location: CollectiveLocation, device: torch.device | None, seconds: float
    ) -> None:
        self._device = _near(location.device, device)
        self._side = SideStream(self._device)
        self.turn = threading.Lock()
        self._kept: list[ShmBuffer] = []
        self._pair: Pair | None = None
        try:
            connection = socket.create_connection((location.address, location.port), seconds)
        except OSError as error:
            raise LinkError(f"cannot reach the trainer: {error}") from error
        self._control = Control(connection, seconds)
        try:
            self._control.send(token=location.token)
            port = self._control.receive()["port"]
            store = connected_store(location.address, port, seconds)
            self._pair = join(
                store, READER, location.device, address=location.address, seconds=seconds
            )
        except BaseException:
            self.close()
            raise

    def fetch(self, part: Part, version: int, pieces: Sequence[Piece], *, alone: bool) -> Held:
        """The pieces of a part. `alone`: not from another reader's memory."""
        messages = lay_out(part.slots, pieces)
        answer = self._ask(part, version, pieces, messages, alone=alone)
        starts, nbytes = place(messages)
        slots = _slots_of(part, pieces, messages, starts)
        here = replace(part, slots=slots, changed=(part.number,) * len(slots), checksums=())
        if "copy" in answer:
            try:
                copy = _Shared(replace(here, location=ShmLocation(*answer["copy"])), version)
            except WeightSyncError as error:
                raise CopyGoneError(str(error)) from error
            copy.checksums = answer["checksums"]
            return copy
        ends = [start + message.nbytes for start, message in zip(starts, messages, strict=True)]
        bounds = list(zip(starts, ends, strict=True))
        if self._device.type == "cpu":
            held = self._receive_shared(nbytes, bounds, here, version)
        else:
            held = self._receive_on_device(nbytes, bounds, slots)
        held.checksums = answer["checksums"]
        held.received = sum(slot.nbytes for slot in slots)
        return held

    def _ask(
        self,
        part: Part,
        version: int,
        pieces: Sequence[Piece],
        messages: Sequence[Message],
        *,
        alone: bool,
    ) -> dict[str, Any]:
        """Ask for pieces; the answer says where a copy is, or that they are on their way."""
        partial = {piece.slot for piece in pieces if piece.box != slot_box(part.slots[piece.slot])}
        self._control.send(
            number=part.number,
            version=version,
            pieces=[[piece.slot, *piece.box] for piece in pieces],
            sizes=[message.nbytes for message in messages],
            checksums={slot: part.checksums[slot] for slot in partial if part.checksums},
            host="" if alone or self._device.type != "cpu" else machine_id(),
        )
        while (answer := self._control.receive()).get("wait"):
            pass  # another reader is receiving the same
        if "stale" in answer:
            raise StaleHandleError(answer["stale"])
        if "wrong" in answer:
            raise WrongWeightsError(answer["wrong"])
        return answer

    def _receive_shared(self, nbytes: int, bounds: Bounds, here: Part, version: int) -> Held:
        buffer = self._buffer(nbytes)
        try:
            self._receive(buffer.data, bounds)
        except BaseException:
            buffer.close()
            raise
        location = buffer.seal(here.number, version, here.slots)
        self._kept.append(buffer)
        self._control.send(copy=astuple(location))
        return _Shared(replace(here, location=location), version)

    def _receive_on_device(self, nbytes: int, bounds: Bounds, slots: Sequence[Slot]) -> Held:
        data = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._receive(data, bounds)
        self._control.send(copy=None)
        return _OnDevice(data, slots)

    def _receive(self, data: torch.Tensor, bounds: Bounds) -> None:
        assert self._pair is not None
        messages = (data[first:last] for first, last in bounds)
        with self._side.after(self._side.mark()):
            transfer(self._pair, messages, sending=False)

    @property
    def is_closed(self) -> bool:
        """Whether the trainer's rank has gone."""
        return self._control.is_closed

    def close(self) -> None:
        """Drop the group; whoever has received something keeps it."""
        self._control.close()
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.close()
        while self._kept:
            self._kept.pop().close()

    def _buffer(self, nbytes: int) -> ShmBuffer:
        # To touch new memory takes as long as to receive it: the last is taken again.
        while self._kept:
            buffer = self._kept.pop(0)
            if len(buffer.data) >= nbytes and buffer.reopen():
                return buffer
            buffer.close()  # who reads it goes on
        return ShmBuffer(max(nbytes, 1))


def _slots_of(
    part: Part, pieces: Sequence[Piece], messages: Sequence[Message], starts: Sequence[int]
) -> tuple[Slot, ...]:
    """A slot per piece, with its place in the memory that the messages are received in."""
    offsets = [0] * len(pieces)
    for message, start in zip(messages, starts, strict=True):
        for number, position in zip(message.pieces, message.positions, strict=True):
            offsets[number] = start + position
    slots = []
    for (number, box), offset in zip(pieces, offsets, strict=True):
        slot = part.slots[number]
        nbytes = torch.Size(box.shape).numel() * slot.dtype.itemsize
        slots.append(Slot(slot.name, slot.whole, *box, slot.dtype, offset, nbytes))
    return tuple(slots)


def _near(trainers: str, device: torch.device | None) -> torch.device:
    """The device that receives from a trainer's."""
    if trainers == "cpu":
        return torch.device("cpu")  # what is received is copied to a GPU as it is loaded
    if device is not None and device.type == trainers:
        return device
    if not torch.cuda.is_available():
        raise WeightSyncError(
            "the trainer's weights are on a GPU, and there is none here to receive them: set "
            "trainer.weight_sync.transport to shm, rdma or file"
        )
    return torch.device("cuda", torch.cuda.current_device())


_links: dict[tuple[str, int, str], Link] = {}
_links_changed = threading.Lock()


@atexit.register
def _drop_all() -> None:
    """Drop all groups; one that is there as Python ends would abort the process."""
    with _links_changed:
        links = list(_links.values())
    for link in links:
        _drop(link)


def _receive(
    part: Part, version: int, pieces: Sequence[Piece], device: torch.device | None
) -> Held:
    """The pieces of a part, by the link to its rank; if that breaks, once more by a new one."""
    alone, broken = False, False
    while True:
        link = None
        try:
            link = _link_to(part.location, device)
            return _fetch(link, part, version, pieces, alone=alone)
        except CopyGoneError:
            alone = True
        except LinkError as error:
            if broken or link is None:
                raise LinkError(
                    f"policy version {version} could not be received: {error}. Is the trainer "
                    "alive?"
                ) from error
            broken = True


def _fetch(link: Link, part: Part, version: int, pieces: Sequence[Piece], *, alone: bool) -> Held:
    """The pieces of a part by a link, which is dropped unless it can be asked again."""
    with link.turn:
        try:
            return link.fetch(part, version, pieces, alone=alone)
        except (StaleHandleError, WrongWeightsError, CopyGoneError):
            raise  # a whole answer: the next question gets its own
        except BaseException:
            _drop(link)
            raise


def _link_to(location: CollectiveLocation, device: torch.device | None) -> Link:
    """The link to a trainer rank; those to ranks that have gone are dropped."""
    key = location.address, location.port, location.token
    with _links_changed:
        gone = [link for link in _links.values() if not link.turn.locked() and link.is_closed]
    for link in gone:
        _drop(link)
    with _links_changed:
        if key in _links:
            return _links[key]
    link = Link(location, device, SECONDS)
    with _links_changed:
        kept = _links.setdefault(key, link)
    if kept is not link:
        link.close()
    return kept


def _drop(link: Link) -> None:
    with _links_changed:
        for key in [key for key, other in _links.items() if other is link]:
            del _links[key]
    link.close()
