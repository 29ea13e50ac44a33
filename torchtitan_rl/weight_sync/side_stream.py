"""Copies of a device beside the kernels that compute on it.

What a thread queues goes to the stream that the next step's kernels go to as well, and a copy would
wait for them. A CPU has the same classes, which do nothing: there, copies are done when they
return.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

_log = logging.getLogger(__name__)


class SideStream:
    """A stream of a device for copies only.

    Example:
        side = SideStream(torch.device("cuda", 0))
        written = side.mark()  # by the thread that has queued the optimizer's kernels
        with side.after(written):  # by any thread
            snapshot.copy_(weights, non_blocking=True)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        # A stream of the CPU takes no device.
        on = {"device": device} if device.type == "cuda" else {}
        self._stream = self._module.Stream(**on)
        self._pinned: set[int] = set()

    def mark(self) -> Any:
        """All that this thread has queued so far, for `after`."""
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    @contextlib.contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        """Have what is queued inside wait for what was marked, and for nothing queued later.
        Returns when it is done."""
        with self._module.stream(self._stream):
            self._stream.wait_event(mark)
            yield
            done = self.mark()
        done.synchronize()

    def pin(self, memory: torch.Tensor) -> None:
        """Have the device copy to [bytes] of CPU memory by itself; without it, it would copy to a
        buffer of its own, and wait for a thread to copy on from there."""
        if self._device.type != "cuda" or not memory.is_cpu:
            return
        address = memory.data_ptr()
        error = int(torch.cuda.cudart().cudaHostRegister(address, memory.numel(), 0))
        if error:
            _log.warning(
                "snapshots of weights are copied slowly: %d MB of memory cannot be pinned (CUDA "
                "error %d). Is `ulimit -l` high enough?",
                memory.numel() >> 20,
                error,
            )
        else:
            self._pinned.add(address)

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo `pin`, before the memory is freed."""
        address = memory.data_ptr()
        if address in self._pinned:
            self._pinned.remove(address)
            torch.cuda.cudart().cudaHostUnregister(address)


def copy_over(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors to others of the same shapes, converting them where they are: memory to which a
    device copies by itself gets the bytes as they are."""
    near = [to.device == of.device for to, of in zip(targets, sources, strict=True)]
    if all(near):
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source.to(target.dtype), non_blocking=True)
