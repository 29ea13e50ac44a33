"""Weight sync over a shared file system: one safetensors file per rank and version.

A file gets its final name when it is complete. The two newest files stay. A separate process
removes all of them when the trainer ends, even by SIGKILL.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from torchtitan_rl.weight_sync.boxes import Box, cut, slot_box
from torchtitan_rl.weight_sync.handle import (
    Part,
    Slot,
    StaleHandleError,
    WeightSyncError,
    WrongWeightsError,
)


@dataclass(frozen=True, slots=True)
class FileLocation:
    """The file of one rank's snapshot."""

    path: str


class FileBuffer:
    """A snapshot in memory that becomes a file when it is sealed."""

    def __init__(self, nbytes: int, folder: Path) -> None:
        self.data = torch.empty(nbytes, dtype=torch.uint8)
        self._folder = folder
        self._file: Path | None = None

    def reopen(self) -> bool:
        self._remove()
        return True

    def seal(self, number: int, version: int, slots: Sequence[Slot]) -> FileLocation:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WeightSyncError(
                f"cannot make a folder for weights: {error}. Is trainer.weight_sync.folder one "
                "that the trainer may write to?"
            ) from error
        tensors = {
            str(slot): self.data[slot.offset : slot.offset + slot.nbytes]
            .view(slot.dtype)
            .view(slot.shape)
            for slot in slots
        }
        # A version may be published twice.
        file = self._folder / f"{number}-version-{version}.safetensors"
        half = file.with_suffix(".half-written")
        save_file(tensors, half, metadata={"format": "pt", "version": str(version)})
        half.rename(file)
        self._file = file
        return FileLocation(str(file))

    def close(self) -> None:
        self._remove()

    def _remove(self) -> None:
        # Readers that have the file open can go on reading it.
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        self._file = None


class FileReader:
    """Reader of one rank's snapshot file."""

    received = 0

    def __init__(self, part: Part, version: int) -> None:
        path = part.location.path
        try:
            self._file = safe_open(path, "pt")
        except FileNotFoundError:
            raise StaleHandleError(
                f"policy version {version} is gone: {path} has been removed, or is on a file "
                "system that this host does not share"
            ) from None
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"cannot read the weights in {path}: {error}") from error
        if (held := self._file.metadata().get("version")) != str(version):
            raise StaleHandleError(f"{path} holds policy version {held}, not {version}")
        self._path, self._part = path, part

    def tensor_of(self, number: int) -> torch.Tensor:
        slot = self._part.slots[number]
        try:
            tensor = self._file.get_tensor(str(slot))
        except SafetensorError as error:
            raise WrongWeightsError(f"{self._path} lacks {slot}: {error}") from error
        if tuple(tensor.shape) != slot.shape or tensor.dtype != slot.dtype:
            raise WrongWeightsError(
                f"{self._path} has {slot} as {tensor.dtype} {tuple(tensor.shape)}; "
                f"{slot.dtype} {slot.shape} were published"
            )
        return tensor

    def box_of(self, number: int, box: Box) -> torch.Tensor:
        return cut(self.tensor_of(number), slot_box(self._part.slots[number]), box)

    def checked(self, number: int) -> list[tuple[torch.Tensor, int]]:
        return [(self.tensor_of(number), self._part.checksums[number])]

    def close(self) -> None:
        del self._file
