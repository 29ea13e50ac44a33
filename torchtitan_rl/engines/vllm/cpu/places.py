"""Where the weights of a plain vLLM model are: one in fp32 on a CPU, in one process, of nothing but
Linears, norms, embeddings and an output layer. For vLLM 0.32.

On a CPU vLLM packs each matrix by oneDNN when it has loaded it: `cpu_linear` of a module multiplies
by the packed copy, and `weight` is empty or, of embeddings and output layers, what was packed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.engines.vllm.cpu.kernels import CpuRMSNorm
from torchtitan_rl.weight_sync.handle import Shape

SINGLE = (linear.ReplicatedLinear, linear.ColumnParallelLinear, linear.RowParallelLinear)
FUSED = (linear.MergedColumnParallelLinear, linear.QKVParallelLinear)
UNQUANTIZED = (linear.UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


class NotPlainError(TorchtitanRLError):
    """Something in a model is not known here: vLLM has to load it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where tensors go, one below the other. Rows of the parameter that are left are padding of the
    vocabulary: zeros, and they stay."""

    names: list[str]
    shapes: list[Shape]
    parameter: Tensor | None
    """What they are copied to; None: they are only packed."""
    modules: list[Any]
    """What multiplies by them."""

    def put(self, tensors: list[Tensor]) -> None:
        for rows, tensor in zip(self._rows(), tensors, strict=False):
            rows.copy_(tensor)
        for module in self.modules:
            pack(module, self._factors(tensors))

    def has(self, tensors: list[Tensor]) -> bool:
        """Whether the model serves these."""
        same = all(map(torch.equal, self._rows(), tensors))
        return same and all(multiplies_by(m, self._factors(tensors)) for m in self.modules)

    def _rows(self) -> tuple[Tensor, ...]:
        sizes = [shape[0] for shape in self.shapes]
        return () if self.parameter is None else self.parameter[: sum(sizes)].split(sizes)

    def _factors(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors if self.parameter is None else [self.parameter]


def pack(module: Any, tensors: list[Tensor]) -> None:
    """Have a module multiply by tensors, one below the other; they are copied."""
    module.cpu_linear = None  # first, so that the new matrix can have the memory of the old
    handler = ops.create_onednn_mm(_whole(tensors).t(), 32)  # as vLLM does
    module.cpu_linear = lambda x, weight, bias: ops.onednn_mm(handler, x, bias)


def multiplies_by(module: Any, tensors: list[Tensor]) -> bool:
    """Whether a module's product is the one by tensors, one below the other."""
    whole = _whole(tensors)
    x = torch.randn(4, whole.shape[1], generator=torch.Generator().manual_seed(0))
    made = module.cpu_linear(x, module.weight, None)
    return torch.allclose(made, F.linear(x, whole), rtol=1e-4, atol=1e-4)


def _whole(tensors: list[Tensor]) -> Tensor:
    """Without a copy, if it is one: it may be a whole vocabulary."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def find_places(model: nn.Module) -> list[Place]:
    """Of all parameters of a model that vLLM has loaded; raises NotPlainError if one is not known
    here."""
    fused = getattr(model, "packed_modules_mapping", {})
    places: list[Place] = []
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if any(parameter.dtype != torch.float32 for parameter in own.values()):
            raise NotPlainError(path)
        before, dot, name = path.rpartition(".")
        if type(module) in SINGLE:
            places += _of_linear(module, [path], [module.output_size])
        elif type(module) in FUSED:
            sources = [before + dot + source for source in fused.get(name, ())]
            places += _of_linear(module, sources, module.output_sizes)
        elif type(module) in (VocabParallelEmbedding, ParallelLMHead):
            _add_vocabulary(places, module, path)
        elif type(module) is CpuRMSNorm and own.keys() == {"weight"}:
            shape = tuple(module.weight.shape)
            places.append(Place([f"{path}.weight"], [shape], module.weight, []))
        elif own:
            raise NotPlainError(f"{path}: {type(module).__name__}")
    if not any(place.parameter is not None and place.modules for place in places):
        raise NotPlainError("no output layer, or one that is also the embedding")
    return places


def _of_linear(module: Any, paths: list[str], sizes: list[int]) -> Iterator[Place]:
    _check_packed(module, sum(sizes))
    if len(paths) != len(sizes):
        raise NotPlainError(f"{paths} are not the parts of a matrix of {sizes} rows")
    shapes: list[Shape] = [(size, module.input_size) for size in sizes]
    yield Place([f"{path}.weight" for path in paths], shapes, None, [module])
    if module.bias is not None:
        biases = [f"{path}.bias" for path in paths]
        yield Place(biases, [(size,) for size in sizes], module.bias, [])


def _add_vocabulary(places: list[Place], module: Any, path: str) -> None:
    """An embedding or an output layer, which may share a parameter."""
    _check_packed(module, module.num_embeddings_padded)
    if getattr(module, "bias", None) is not None or module.num_added_embeddings:
        raise NotPlainError(path)
    place = next((place for place in places if place.parameter is module.weight), None)
    if place is None:
        shape = (module.org_vocab_size, module.embedding_dim)
        place = Place([f"{path}.weight"], [shape], module.weight, [])
        places.append(place)
    if type(module) is ParallelLMHead:
        place.modules.append(module)


def _check_packed(module: Any, outputs: int) -> None:
    """Raise NotPlainError unless vLLM has packed a module's matrix, as a whole, by oneDNN."""
    cells = getattr(getattr(module, "cpu_linear", None), "__closure__", None) or ()
    handlers = [c.cell_contents for c in cells if type(c.cell_contents) is ops.CPUDNNLGEMMHandler]
    packed = [(handler.n, handler.k) for handler in handlers] == [(outputs, module.input_size)]
    own = {name for name, _ in module.named_parameters(recurse=False)} <= {"weight", "bias"}
    if not (packed and own and type(module.quant_method) in UNQUANTIZED):
        raise NotPlainError(f"{type(module).__name__} of {outputs} outputs")
