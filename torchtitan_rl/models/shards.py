"""Shards of a trainer rank: which boxes of which HF tensors it has in memory, without gathering."""

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
"""Number of rows larger than that of any parameter."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of an HF tensor: rows of one parameter of the trainer's model."""

    name: str
    rows: np.ndarray
    """Row of the parameter for each row of the tensor; one entry if the tensor is a single row."""
    is_row: bool
    """Whether the tensor is a single row, as an expert's matrix is in all experts' parameter."""


def trace_rows(spec: ModelSpec, adapter: Any) -> dict[str, list[Origin]]:
    """HF tensors that each parameter becomes, by parameter name.

    The mapping is traced, not written down: a model whose parameters hold the numbers of their own
    rows goes through the model's state dict hooks (which split fused q, k, v) and through the
    adapter (which renames, and splits experts).
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
    """A box of an HF tensor that this rank owns, as runs of rows of a local tensor."""

    name: str
    whole: Shape
    start: Shape
    parameter: str
    runs: tuple[tuple[int, int], ...]
    """First local row and number of rows, per run."""
    is_row: bool

    def shard(self, local: torch.Tensor) -> Shard:
        """The box as a shard of the live weights."""
        if self.is_row:
            return Shard(self.name, self.whole, self.start, (local[self.runs[0][0]],))
        rows = tuple(local[first : first + count] for first, count in self.runs)
        return Shard(self.name, self.whole, self.start, rows)


class LocalWeights:
    """A rank's share of a model's weights, as boxes of HF tensors.

    A box that several ranks have is published by the first of them.
    """

    def __init__(self, model: nn.Module, spec: ModelSpec, adapter: Any) -> None:
        # Kept, not looked up each time: FSDP replaces parameters by gathered ones for a while.
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

    @property
    def numel(self) -> int:
        """Number of values that this rank publishes."""
        return sum(
            parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()
            for parameter in self._parameters.values()
            if _publishes(parameter)
        )

    @torch.no_grad()
    def shards(self) -> list[Shard]:
        """Shards of the live weights; copy them before the next optimizer step.

        The same objects are returned until the memory of a parameter moves, as it may when a
        checkpoint is loaded.
        """
        local = {  # detached: even here a view of a parameter wants a gradient
            name: (p.to_local() if isinstance(p, DTensor) else p).detach()
            for name, p in self._parameters.items()
        }
        # The shards keep their memory alive, so nothing else can get the same addresses.
        addresses = [tensor.data_ptr() for tensor in local.values()]
        if addresses != self._addresses:
            self._addresses = addresses
            self._shards = [owned.shard(local[owned.parameter]) for owned in self._owned]
        return self._shards


def _publishes(parameter: torch.Tensor) -> bool:
    """Whether this rank publishes a parameter: it is the first of the ranks with the same box."""
    if not isinstance(parameter, DTensor):
        return dist.get_rank() == 0
    coordinate: Sequence[int] = parameter.device_mesh.get_coordinate() or []
    return all(
        at == 0 or not placement.is_replicate()
        for at, placement in zip(coordinate, parameter.placements, strict=True)
    )


def _box(parameter: torch.Tensor) -> tuple[Shape, Shape]:
    """Shape and start of this rank's box of a parameter."""
    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape), (0,) * parameter.ndim
    shape, start = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(shape), tuple(start)


def _owned(
    parameter: str, whole: Shape, local: Shape, start: Shape, origin: Origin
) -> Iterator[Owned]:
    """Boxes of one HF tensor within a local box of the parameter that it comes from."""
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
    # Rows that follow each other in the HF tensor are one box, wherever they are in local memory.
    for box in np.split(here, np.nonzero(np.diff(here) != 1)[0] + 1):
        rows = origin.rows[box] - first
        pieces = np.split(rows, np.nonzero(np.diff(rows) != 1)[0] + 1)
        runs = tuple((int(piece[0]), len(piece)) for piece in pieces)
        yield Owned(origin.name, tensor, (int(box[0]), *start[1:]), parameter, runs, False)
