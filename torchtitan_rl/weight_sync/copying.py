"""Bytes in CPU memory: looked at, compared, and copied by threads that are woken once for all.

ATen's threads are woken for each tensor, and sleep in between (`worker_env` has them): of 135M
parameters that takes a sixth of the time. The bytes are numpy's, whose calls cost a fraction of
those of ATen or ctypes: in a small model that is what takes the time.
"""

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import torch

_memcmp = ctypes.CDLL(None).memcmp  # leaves Python to other threads meanwhile, as numpy does
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_PIECE = 8 << 20
"""Most bytes of one call: a thread that is slower, as its core is in use, then does fewer."""

Copy = tuple[np.ndarray, np.ndarray]
"""[bytes] uint8 to copy to, and as many to copy from."""


def bytes_of(tensor: torch.Tensor, dtype: torch.dtype) -> np.ndarray | None:
    """Its memory, [bytes] uint8, if that is in order, of `dtype` and a CPU's; else None.

    Example:
        >>> bytes_of(torch.tensor([1, 2], dtype=torch.int16), torch.int16)
        array([1, 0, 2, 0], dtype=uint8)
        >>> bytes_of(torch.ones(2, 3).t(), torch.float32)
    """
    if not (tensor.is_cpu and tensor.dtype == dtype and tensor.is_contiguous()):
        return None
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two runs of bytes are the same. Ends at the first difference."""
    return _memcmp(one.ctypes.data, other.ctypes.data, len(one)) == 0


def copy(copies: Sequence[Copy], pool: ThreadPoolExecutor, threads: int) -> None:
    """Do all of them, here and on up to `threads` - 1 threads of the pool. Returns when no thread
    reads or writes any more, also if it fails."""
    # To wake a thread takes as long as to copy some MB.
    helpers = min(threads - 1, sum(len(source) for _, source in copies) // _PIECE)
    if not helpers:  # there is nobody to share pieces with
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
    """Copy until none is left; more than one thread may take from the list."""
    while True:
        try:
            target, source = pieces.pop()
        except IndexError:
            return
        np.copyto(target, source)
