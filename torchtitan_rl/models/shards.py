"""Which boxes of which HF tensors a trainer rank has in memory, without gathering any."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl.weight_sync.handle import Shape, Shard

_ROWS = 1 << 32
"""More than any parameter has."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an HF tensor comes from: rows of one parameter of the trainer's model."""

    name: str
    rows: np.ndarray
    """Of each of its rows, which row of the parameter it is; of a tensor that is one row, that."""
    is_row: bool
    """Whether it is one row, as an expert's matrix is of all experts'."""


def trace_rows(spec: ModelSpec, adapter: Any) -> dict[str, list[Origin]]:
    """By parameter name, the HF tensors that are made of it.

    Traced, not written down: a model whose parameters hold the numbers of their own rows goes
    through the model's state dict hooks (which split fused q, k, v) and through the adapter (which
    renames, and splits experts).
    """
    with torch.device("meta"):
        model = spec.model.build()
    names = [name for name, _ in model.named_parameters()]
    for number, name in enumerate(names):
        module, _, leaf = name.rpartition(".")
        parameter = model.get_parameter(name)
        rows = torch.arange(parameter.shape[0]).view(-1, *[1] * (parameter.ndim - 1))
        numbered = nn.Parameter(number * _ROWS + rows, requires_grad=False)
        setattr(model.get_submodule(module), leaf, numbered)
    origins: dict[str, list[Origin]] = {name: [] for name in names}
    for hf_name, traced in adapter.to_hf(model.state_dict()).items():
        numbers = traced.numpy().reshape(-1)
        name = names[numbers[0] // _ROWS]
        origins[name].append(Origin(hf_name, numbers % _ROWS, traced.ndim == 0))
    return origins


@dataclass(frozen=True, slots=True)
class Owned:
    """A box of an HF tensor, and where this rank has it: runs of rows of a local tensor."""

    name: str
    whole: Shape
    start: Shape
    parameter: str
    runs: tuple[tuple[int, int], ...]
    """First local row and number of rows."""
    is_row: bool

    def shard(self, local: torch.Tensor) -> Shard:
        if self.is_row:
            return Shard(self.name, self.whole, self.start, (local[self.runs[0][0]],))
        rows = tuple(local[first : first + count] for first, count in self.runs)
        return Shard(self.name, self.whole, self.start, rows)


class LocalWeights:
    """A rank's share of a model's weights, as boxes of HF tensors.

    Of what several ranks have, the first of them publishes it.
    """

    def __init__(self, model: nn.Module, spec: ModelSpec, adapter: Any) -> None:
        # Kept, not looked up each time: FSDP puts gathered ones into the model's place for a while.
        # torchtitan's activation checkpointing wraps layers, and their names with them.
        self._parameters = {
            name.replace("_checkpoint_wrapped_module.", ""): parameter
            for name, parameter in model.named_parameters()
        }
        self._owned: list[Owned] = []
        self._shards: list[Shard] = []
        self._addresses: list[int] = []
        origins = trace_rows(spec, adapter)
        for name, parameter in self._parameters.items():
            if not _publishes(parameter):
                continue
            local, start = _box(parameter)
            for origin in origins[name]:
                self._owned += _owned(name, tuple(parameter.shape), local, start, origin)

    @torch.no_grad()
    def shards(self) -> list[Shard]:
        """The live weights of now: copy them before the next optimizer step. The same shards again,
        unless the memory of a parameter has moved, as it may when a checkpoint is loaded."""
        local = {
            name: p.to_local() if isinstance(p, DTensor) else p
            for name, p in self._parameters.items()
        }
        # The shards keep their memory, so that nothing else can come to lie where they are.
        addresses = [tensor.data_ptr() for tensor in local.values()]
        if addresses != self._addresses:
            self._addresses = addresses
            self._shards = [owned.shard(local[owned.parameter]) for owned in self._owned]
        return self._shards


def _publishes(parameter: torch.Tensor) -> bool:
    """Whether this rank is the first of those with the same box."""
    if not isinstance(parameter, DTensor):
        return dist.get_rank() == 0
    coordinate: Sequence[int] = parameter.device_mesh.get_coordinate() or []
    return all(
        at == 0 or not placement.is_replicate()
        for at, placement in zip(coordinate, parameter.placements, strict=True)
    )


def _box(parameter: torch.Tensor) -> tuple[Shape, Shape]:
    """Shape and start of what this rank has of a parameter."""
    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape), (0,) * parameter.ndim
    shape, start = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(shape), tuple(start)


def _owned(
    parameter: str, whole: Shape, local: Shape, start: Shape, origin: Origin
) -> Iterator[Owned]:
    """The boxes of one HF tensor in a local box of the parameter it comes from."""
    if 0 in local:
        return
    first, last = start[0], start[0] + local[0]
    here = np.nonzero((origin.rows >= first) & (origin.rows < last))[0]
    if not len(here):
        return
    if origin.is_row:
        row = (int(origin.rows[0]) - first, 1)
        yield Owned(origin.name, whole[1:], start[1:], parameter, (row,), True)
        return
    tensor = (len(origin.rows), *whole[1:])
    # Rows that follow each other in the HF tensor are one box, wherever they are here.
    for box in np.split(here, np.nonzero(np.diff(here) != 1)[0] + 1):
        rows = origin.rows[box] - first
        pieces = np.split(rows, np.nonzero(np.diff(rows) != 1)[0] + 1)
        runs = tuple((int(piece[0]), len(piece)) for piece in pieces)
        yield Owned(origin.name, tensor, (int(box[0]), *start[1:]), parameter, runs, False)
