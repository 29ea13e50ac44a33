"""Weight sync on one host: memory files as tensors, mapped by the readers."""

import mmap
import threading
import warnings
from collections import OrderedDict
from collections.abc import Sequence

import torch

from torchtitan_rl.weight_sync.boxes import Box, cut, slot_box
from torchtitan_rl.weight_sync.handle import Part, Slot
from torchtitan_rl.weight_sync.memory_file import (
    HEADER_BYTES,
    MemoryFile,
    OpenMemoryFile,
    ShmLocation,
)

_MAPPINGS_KEPT = 128
"""Most mappings kept by a reader: the first touch of a page costs ten times a later one, so the two
mappings of every trainer rank stay. They use only the writer's memory, and go when it gives it
up."""


class ShmBuffer:
    """One memory file of this process, and its data as a tensor."""

    def __init__(self, nbytes: int) -> None:
        self._file = MemoryFile(nbytes)
        self.data = torch.frombuffer(self._file.map, dtype=torch.uint8)[HEADER_BYTES:]

    def reopen(self) -> bool:
        return self._file.reopen()

    def seal(self, number: int, version: int, _slots: Sequence[Slot]) -> ShmLocation:
        return self._file.seal(number, version)

    def close(self) -> None:
        self._file.close()
        del self.data


class ShmReader:
    """Reader of a part; the part stays unchanged until the reader is closed."""

    received = 0

    def __init__(self, part: Part, version: int) -> None:
        with _mappings_changed:
            self._mapping, self._part = _map(part.location), part
            self._mapping.lock(part.number, version)
            self._views = self._mapping.views(part.slots)

    def tensor_of(self, number: int) -> torch.Tensor:
        """A view of a slot's tensor, valid until the reader is closed."""
        return self._views[number].detach()  # a caller that reshapes it must not reshape ours

    def box_of(self, number: int, box: Box) -> torch.Tensor:
        """A view of a box of a slot's tensor."""
        return cut(self.tensor_of(number), slot_box(self._part.slots[number]), box)

    def checked(self, number: int) -> list[tuple[torch.Tensor, int]]:
        """What a slot's checksum is of, and the checksum."""
        return [(self.tensor_of(number), self._part.checksums[number])]

    def close(self) -> None:
        with _mappings_changed:
            self._mapping.unlock()


class _Mapping(OpenMemoryFile):
    """A memory file, mapped into a reader's process."""

    def __init__(self, location: ShmLocation) -> None:
        super().__init__(location)
        # Not to be written to: other processes read the same pages.
        self._map = mmap.mmap(self.fd, location.size, prot=mmap.PROT_READ)
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # about that
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._slots: tuple[Slot, ...] = ()
        self._views: list[torch.Tensor] = []

    def views(self, slots: tuple[Slot, ...]) -> list[torch.Tensor]:
        """Tensors of the slots. They are kept, since every other version has the same slots."""
        if slots != self._slots:
            data = self._bytes[HEADER_BYTES:]
            self._slots, self._views = (
                slots,
                [data[s.offset : s.offset + s.nbytes].view(s.dtype).view(s.shape) for s in slots],
            )
        return self._views

    def unlock(self) -> None:
        """Let the writer overwrite it, or forget it if its writer has given it up."""
        super().unlock()
        if not self.is_read and self.is_given_up:
            _mappings.pop(self.location, None)
            self.close()  # not its map: views of it may exist, and it goes with the last of them


_mappings: "OrderedDict[ShmLocation, _Mapping]" = OrderedDict()
_mappings_changed = threading.Lock()


def _map(location: ShmLocation) -> _Mapping:
    """The mapping of a buffer; the most recently used mappings are kept."""
    if location not in _mappings:
        for other in [at for at, mapping in _mappings.items() if not mapping.is_needed]:
            _mappings.pop(other).close()
        unread = [at for at, mapping in _mappings.items() if not mapping.is_read]
        for oldest in unread[: max(0, len(_mappings) + 1 - _MAPPINGS_KEPT)]:
            _mappings.pop(oldest).close()
        _mappings[location] = _Mapping(location)
    _mappings.move_to_end(location)
    return _mappings[location]
