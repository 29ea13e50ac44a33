"""Tensors of a trainer in host memory, while others use its GPU."""

from collections.abc import Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor


class HostMemory:
    """Keeps the values of tensors in host memory for a while, in which they have no memory.

    Parameters, FSDP and optimizers refer to the same tensors in many places. So these stay, with
    all views of them, and only the memory below is emptied and filled again, as FSDP does with
    gathered weights. The host memory is pinned, for copies at full speed, and kept: pinning it
    takes longer than the copies.

    Not for memory that NumPy has seen, as it may have of weights on a CPU: torch does not empty it.

    Example:
        memory = HostMemory()
        memory.offload(model.parameters())
        ...
        memory.restore()
    """

    def __init__(self) -> None:
        self._buffers: dict[int, torch.Tensor] = {}
        """[bytes] uint8 by place in the order of the tensors."""
        self._moved: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    @torch.no_grad()
    def offload(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy tensors to host memory, and give theirs back; none may be used until `restore`."""
        assert not self._moved, "tensors are offloaded already"
        for place, storage in enumerate(_storages(tensors)):
            buffer = self._buffers.get(place)
            if buffer is None or len(buffer) != storage.nbytes():
                buffer = torch.empty(
                    storage.nbytes(), dtype=torch.uint8, pin_memory=torch.cuda.is_available()
                )
                self._buffers[place] = buffer
            buffer.copy_(_bytes(storage), non_blocking=True)
            self._moved.append((storage, buffer))
        _wait()
        for storage, _ in self._moved:
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # for other processes: else this one's allocator keeps it

    @torch.no_grad()
    def restore(self) -> None:
        """Give the tensors memory of their own again, with the values they had."""
        for storage, buffer in self._moved:
            storage.resize_(len(buffer))
            _bytes(storage).copy_(buffer, non_blocking=True)
        _wait()
        self._moved.clear()


def _storages(tensors: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    """The memory of tensors, each once; of a distributed one this process's share."""
    seen: set[int] = set()
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """[bytes] uint8, in the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
