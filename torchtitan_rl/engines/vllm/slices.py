"""Slices of the published tensors that one rank of a tensor-parallel model loads.

vLLM's weight loaders take a rank's slice of every tensor themselves. They are run once over tensors
without memory, which note what is taken of them: vLLM's own, those of its `sharded_rdt` engine.
After that a rank receives only these slices, and its loaders get tensors without memory again,
which copy from the slices. For vLLM 0.32.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.distributed.weight_transfer.sharded_rdt_engine import ShardedRDTWeightTransferEngine
from vllm.distributed.weight_transfer.sharded_rdt_fake import (
    FakeRDTTensor,
    OpChain,
    _meta_copy_,
)
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

from torchtitan_rl.weight_sync.boxes import Box
from torchtitan_rl.weight_sync.handle import Shape
from torchtitan_rl.weight_sync.reading import OpenSnapshot

_log = logging.getLogger(__name__)

Tensors = Mapping[str, tuple[Shape, torch.dtype]]


class Slices:
    """The slices that a model's loaders take.

    Example:
        slices = trace_slices(model, handle.tensors(), device)
        snapshot = open_snapshot(handle, Wanted(boxes=slices.boxes))
        model.load_weights(slices.weights(snapshot, names))
    """

    def __init__(self, tensors: Tensors, taken: Iterable[tuple[str, OpChain]], device: Any) -> None:
        self._tensors, self._device = dict(tensors), device
        self._known = {key: _box(tensors[key[0]][0], key[1]) for key in taken}
        self.boxes: dict[str, list[Box]] = {}
        """Boxes of each tensor that has to be there to load it."""
        for (name, _), box in self._known.items():
            boxes = self.boxes.setdefault(name, [])
            if (needed := box or _whole(tensors[name][0])) not in boxes:
                boxes.append(needed)

    def weights(
        self, snapshot: OpenSnapshot, names: Iterable[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors without memory, by name: what a loader copies of them comes from a snapshot."""
        return _fakes(self._tensors, names, _FromSnapshot(self, snapshot), self._device)

    def read(self, snapshot: OpenSnapshot, name: str, taken: OpChain) -> torch.Tensor:
        """What a loader has taken of a tensor."""
        shape, _ = self._tensors[name]
        box = self._known[name, taken]
        return snapshot.box(name, box) if box else _apply(taken, snapshot.box(name, _whole(shape)))


def trace_slices(model: nn.Module, tensors: Tensors, device: torch.device) -> Slices | None:
    """The slices that the model's loaders take of published tensors; the model stays as it is.
    None: a loader does more than to slice and copy, and needs whole tensors."""
    noted = _Noting()
    try:
        with torch.device(device):
            initialize_layerwise_reload(model)
            try:
                model.load_weights(_fakes(tensors, tensors, noted, device))  # type: ignore[operator]
            finally:
                ShardedRDTWeightTransferEngine._restore_after_dry_run(None, model)
    except Exception as why:  # whatever a loader does with a tensor that has no memory
        _log.info("each rank gets whole tensors, because a loader computes with one: %s", why)
        return None
    return Slices(tensors, noted.taken, device)


class _Noting:
    """Notes what loaders take, and copies nothing."""

    def __init__(self) -> None:
        self.taken: dict[tuple[str, OpChain], None] = {}

    def accept_copy(self, dest: torch.Tensor, src: FakeRDTTensor) -> torch.Tensor:
        """Called in place of `dest.copy_(src)`."""
        self.taken[src._key()] = None
        return dest


class _FromSnapshot:
    """Copies what loaders take from a snapshot."""

    def __init__(self, slices: Slices, snapshot: OpenSnapshot) -> None:
        self._slices, self._snapshot = slices, snapshot

    def accept_copy(self, dest: torch.Tensor, src: FakeRDTTensor) -> torch.Tensor:
        """Called in place of `dest.copy_(src)`."""
        if dest.is_meta:  # vLLM counts, to know when it has all of a layer; then it copies
            return _meta_copy_(dest, src)
        with torch._C.DisableTorchFunctionSubclass():
            return dest.copy_(self._slices.read(self._snapshot, *src._key()).view(src.shape))


def _fakes(
    tensors: Tensors, names: Iterable[str], sink: Any, device: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    wanted = set(names)
    for name, (shape, dtype) in tensors.items():
        if name in wanted:
            yield name, FakeRDTTensor(name, torch.Size(shape), dtype, device, sink=sink)


def _apply(taken: OpChain, tensor: torch.Tensor) -> torch.Tensor:
    for operation, arguments, options in taken:
        tensor = getattr(tensor, operation)(*arguments, **dict(options))
    return tensor


def _box(shape: Shape, taken: OpChain) -> Box | None:
    """The box that is taken of a tensor; None if it is no box, or is turned or reshaped."""
    whole = torch.empty(shape, device="meta")
    piece = _apply(tuple(op for op in taken if op[0] != "contiguous"), whole)
    same = piece.untyped_storage()._cdata == whole.untyped_storage()._cdata
    if not same or piece.stride() != whole.stride() or not piece.numel():
        return None
    start = np.unravel_index(int(piece.storage_offset()), shape) if shape else ()
    return Box(tuple(map(int, start)), tuple(piece.shape))


def _whole(shape: Shape) -> Box:
    return Box((0,) * len(shape), tuple(shape))
