"""Copies in CPU memory, by a few threads that are woken once for all tensors.

ATen's threads are woken for each tensor, and sleep in between (`worker_env` has them): of 135M
parameters that takes a sixth of the time.
"""

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch

_libc = ctypes.CDLL(None)  # its calls leave Python to other threads meanwhile
_memmove, _memcmp = _libc.memmove, _libc.memcmp
_memmove.argtypes = _memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None

_PIECE = 8 << 20
"""Most bytes of one call: a thread that is slower, as its core is in use, then does fewer."""

Copy = tuple[int, int, int]
"""Address to copy to, address to copy from, bytes."""


def address(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Where its bytes lie, if they are those of `dtype`, in CPU memory and in order; else 0.

    Example:
        >>> address(torch.ones(2, 3).t(), torch.float32)
        0
    """
    plain = tensor.is_cpu and tensor.dtype == dtype and tensor.is_contiguous()
    return tensor.data_ptr() if plain else 0


def same(one: int, other: int, nbytes: int) -> bool:
    """Whether the bytes at two addresses are the same. Ends at the first difference."""
    return _memcmp(one, other, nbytes) == 0


def copy(copies: Sequence[Copy], pool: ThreadPoolExecutor, threads: int) -> None:
    """Do all of them, here and on up to `threads` - 1 threads of the pool. Returns when no thread
    reads or writes any more, also if it fails."""
    # To wake a thread takes as long as to copy some MB.
    helpers = min(threads - 1, sum(nbytes for _, _, nbytes in copies) // _PIECE)
    if not helpers:  # there is nobody to share pieces with
        for target, source, nbytes in copies:
            _memmove(target, source, nbytes)
        return
    pieces = [
        (target + first, source + first, min(_PIECE, nbytes - first))
        for target, source, nbytes in copies
        for first in range(0, nbytes, _PIECE)
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
            target, source, nbytes = pieces.pop()
        except IndexError:
            return
        _memmove(target, source, nbytes)
