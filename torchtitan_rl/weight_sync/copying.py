"""Bytes in CPU memory: views of them, comparison, and copies by threads that wake once per call.

ATen wakes its threads for each tensor, and they sleep in between (`worker_env` sets that): with
135M parameters the wake-ups take a sixth of the time. The bytes are numpy arrays, because a call of
numpy costs a fraction of one of ATen or ctypes, and in a small model calls are what takes the time.
"""

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import torch
import xxhash

_memcmp = ctypes.CDLL(None).memcmp  # leaves Python to other threads meanwhile, as numpy does
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_PIECE = 8 << 20
"""Most bytes per copy: small pieces let a thread whose core is busy take fewer of them."""

Copy = tuple[np.ndarray, np.ndarray]
"""[bytes] uint8 to copy to, and as many to copy from."""


def bytes_of(tensor: torch.Tensor, dtype: torch.dtype) -> np.ndarray | None:
    """The memory of a contiguous CPU tensor of `dtype`, as [bytes] uint8; None for any other
    tensor.

    Example:
        >>> bytes_of(torch.tensor([1, 2], dtype=torch.int16), torch.int16)
        array([1, 0, 2, 0], dtype=uint8)
        >>> bytes_of(torch.ones(2, 3).t(), torch.float32)
    """
    if not (tensor.is_cpu and tensor.dtype == dtype and tensor.is_contiguous()):
        return None
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two byte arrays of one length are equal; stops at the first difference."""
    return _memcmp(one.ctypes.data, other.ctypes.data, len(one)) == 0


def checksum(data: torch.Tensor) -> int:
    """64-bit checksum of [bytes] uint8."""
    return xxhash.xxh3_64(data.cpu().numpy()).intdigest()  # type: ignore[arg-type]


def copy(copies: Sequence[Copy], pool: ThreadPoolExecutor, threads: int) -> None:
    """Make all copies, on this thread and on up to `threads` - 1 threads of the pool.

    Returns when no thread reads or writes any more, also if a copy fails.
    """
    # Waking a thread takes as long as copying some MB.
    helpers = min(threads - 1, sum(len(source) for _, source in copies) // _PIECE)
    if not helpers:
        for target, source in copies:
            np.copyto(target, source)
        return
    pieces = [
        (target[first : first + _PIECE], source[first : first + _PIECE])
        for target, source in copies
        for first in range(0, len(source), _PIECE)
    ]
    others = [pool.submit(_work, pieces) for _ in range(helpers)]
    try:
        _work(pieces)
    finally:
        wait(others)


def _work(pieces: list[Copy]) -> None:
    """Copy pieces until the list is empty; several threads may take from it at once."""
    while True:
        try:
            target, source = pieces.pop()
        except IndexError:
            return
        np.copyto(target, source)
