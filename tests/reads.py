"""Counting what a GPU would be waited for, on a CPU."""

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torchtitan_rl

PACKAGE = Path(torchtitan_rl.__file__).parent
READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")
"""Operations whose result the CPU reads: on a GPU they wait for it."""
METHODS = ("tolist", "cpu", "numpy")
"""Methods of a tensor that do, and are no operations where it is on the CPU."""


@contextlib.contextmanager
def counting(reads: Counter[str], collectives: Counter[str] | None = None) -> Iterator[None]:
    """Count what the CPU reads inside the block, forwards and backwards, by the function of ours
    that does it (`models/rank.py predict`); and collectives, by name."""
    collectives = Counter() if collectives is None else collectives
    with _Operations(reads, collectives), _Methods(reads):
        yield


def _who() -> str:
    frames = (f for f in reversed(traceback.extract_stack()) if f.filename.startswith(str(PACKAGE)))
    frame = next(frames, None)
    return f"{Path(frame.filename).relative_to(PACKAGE)} {frame.name}" if frame else "elsewhere"


class _Operations(TorchDispatchMode):
    def __init__(self, reads: Counter[str], collectives: Counter[str]) -> None:
        super().__init__()
        self.reads, self.collectives = reads, collectives

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        library, _, name = func._schema.name.partition("::")
        if name in READS:
            self.reads[_who()] += 1
        elif "c10d" in library:
            self.collectives[name] += 1
        return func(*args, **kwargs or {})


class _Methods(TorchFunctionMode):
    """Sees what is no operation on a CPU: reads, and copies to a device that are waited for."""

    def __init__(self, reads: Counter[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        moves = name == "to" and any(isinstance(a, torch.device | str) for a in args[1:])
        if name in METHODS or (moves and not kwargs.get("non_blocking")):
            self.reads[f"{_who()} ({name})"] += 1
        return func(*args, **kwargs)
