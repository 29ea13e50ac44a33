"""Copies new weights directly into a plain vLLM model: fp32 on a CPU, in one process, with only
Linears, norms, embeddings and an output layer.

vLLM's own `reload_weights` takes a model apart and puts it together again, which takes several
times as long as to copy and pack its weights. On a CPU vLLM packs each matrix by oneDNN when it has
loaded it: `cpu_linear` of a module multiplies by the packed copy, and `weight` is empty or, of
embeddings and output layers, what was packed.

Gain of a whole step: 6 % (tiny), 7 % (135M, of a step of 2 prompts: about 2 % of one of 8) (vLLM
0.32.0, two cores of an Intel Xeon with AVX-512).
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.weight_sync.handle import Shape
from torchtitan_rl.weight_sync.reading import OpenSnapshot

_log = logging.getLogger(__name__)

SINGLE = (linear.ReplicatedLinear, linear.ColumnParallelLinear, linear.RowParallelLinear)
FUSED = (linear.MergedColumnParallelLinear, linear.QKVParallelLinear)
UNQUANTIZED = (linear.UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


class NotPlainError(TorchtitanRLError):
    """A model has a part that is not known here: vLLM has to load its weights."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where some tensors of a snapshot go in a model, one below the other. Rows of the parameter
    that are left are padding of the vocabulary: zeros, and they stay."""

    names: list[str]
    shapes: list[Shape]
    parameter: Tensor | None
    """The tensors are copied to it; None: they are only packed."""
    modules: list[Any]
    """Modules that multiply by the tensors."""

    def put(self, tensors: list[Tensor]) -> None:
        """Have the model compute with these tensors."""
        for rows, tensor in zip(self._rows(), tensors, strict=False):
            rows.copy_(tensor)
        for module in self.modules:
            pack(module, self._factors(tensors))

    def has(self, tensors: list[Tensor]) -> bool:
        """Whether the model computes with these tensors."""
        same = all(map(torch.equal, self._rows(), tensors))
        return same and all(multiplies_by(m, self._factors(tensors)) for m in self.modules)

    def _rows(self) -> tuple[Tensor, ...]:
        sizes = [shape[0] for shape in self.shapes]
        return () if self.parameter is None else self.parameter[: sum(sizes)].split(sizes)

    def _factors(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors if self.parameter is None else [self.parameter]


def pack(module: Any, tensors: list[Tensor]) -> None:
    """Have a module multiply by these tensors, one below the other; they are copied."""
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
    """Tensors one below the other; a single one, which may be a whole vocabulary, is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def find_targets(model: nn.Module) -> list[Target]:
    """The targets of all parameters of a model that vLLM has loaded; raises NotPlainError if there
    is one that is not known here."""
    fused = getattr(model, "packed_modules_mapping", {})
    targets: list[Target] = []
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if any(parameter.dtype != torch.float32 for parameter in own.values()):
            raise NotPlainError(path)
        before, dot, name = path.rpartition(".")
        if type(module) in SINGLE:
            targets += _of_linear(module, [path], [module.output_size])
        elif type(module) in FUSED:
            sources = [before + dot + source for source in fused.get(name, ())]
            targets += _of_linear(module, sources, module.output_sizes)
        elif type(module) in (VocabParallelEmbedding, ParallelLMHead):
            _add_vocabulary(targets, module, path)
        elif isinstance(module, RMSNorm) and own.keys() == {"weight"}:
            shape = tuple(module.weight.shape)
            targets.append(Target([f"{path}.weight"], [shape], module.weight, []))
        elif own:
            raise NotPlainError(f"{path}: {type(module).__name__}")
    if not any(target.parameter is not None and target.modules for target in targets):
        raise NotPlainError("no output layer, or one that is also the embedding")
    return targets


def _of_linear(module: Any, paths: list[str], sizes: list[int]) -> Iterator[Target]:
    _check_packed(module, sum(sizes))
    if len(paths) != len(sizes):
        raise NotPlainError(f"{paths} are not the parts of a matrix of {sizes} rows")
    shapes: list[Shape] = [(size, module.input_size) for size in sizes]
    yield Target([f"{path}.weight" for path in paths], shapes, None, [module])
    if module.bias is not None:
        biases = [f"{path}.bias" for path in paths]
        yield Target(biases, [(size,) for size in sizes], module.bias, [])


def _add_vocabulary(targets: list[Target], module: Any, path: str) -> None:
    """Add the target of an embedding or an output layer, which may share a parameter."""
    _check_packed(module, module.num_embeddings_padded)
    if getattr(module, "bias", None) is not None or module.num_added_embeddings:
        raise NotPlainError(path)
    target = next((target for target in targets if target.parameter is module.weight), None)
    if target is None:
        shape = (module.org_vocab_size, module.embedding_dim)
        target = Target([f"{path}.weight"], [shape], module.weight, [])
        targets.append(target)
    if type(module) is ParallelLMHead:
        target.modules.append(module)


def _check_packed(module: Any, outputs: int) -> None:
    """Raise NotPlainError unless vLLM has packed a module's matrix, as a whole, by oneDNN."""
    cells = getattr(getattr(module, "cpu_linear", None), "__closure__", None) or ()
    handlers = [c.cell_contents for c in cells if type(c.cell_contents) is ops.CPUDNNLGEMMHandler]
    packed = [(handler.n, handler.k) for handler in handlers] == [(outputs, module.input_size)]
    own = {name for name, _ in module.named_parameters(recurse=False)} <= {"weight", "bias"}
    if not (packed and own and type(module.quant_method) in UNQUANTIZED):
        raise NotPlainError(f"{type(module).__name__} of {outputs} outputs")


class DirectLoader:
    """Loads snapshots into a model of which it knows where each tensor goes.

    Example:
        loader = plan_direct_loads(model, first)  # which vLLM has loaded
        if loader is not None and loader.fits(second):
            loader.load(second, second.handle.changed_since(first.handle))
    """

    def __init__(self, targets: list[Target]) -> None:
        self._targets = {name: target for target in targets for name in target.names}
        self._expected = {
            name: (shape, torch.float32)
            for target in targets
            for name, shape in zip(target.names, target.shapes, strict=True)
        }

    def fits(self, snapshot: OpenSnapshot) -> bool:
        """Whether a snapshot has all tensors of the model and no others, in fp32."""
        return snapshot.handle.tensors() == self._expected

    def agrees(self, snapshot: OpenSnapshot) -> bool:
        """Whether the model has the weights of a snapshot that vLLM has loaded. Some models change
        weights as they load them, which their modules do not show."""
        return all(
            target.has(tensors) for target, tensors in self._complete(snapshot, self._targets)
        )

    def load(self, snapshot: OpenSnapshot, names: Iterable[str]) -> None:
        """Have the model compute with these tensors of a snapshot that fits."""
        for target, tensors in self._complete(snapshot, names):
            target.put(tensors)

    def _complete(
        self, snapshot: OpenSnapshot, names: Iterable[str]
    ) -> Iterator[tuple[Target, list[Tensor]]]:
        """Targets and their tensors, each as soon as it has all: tensors that are put together from
        the parts of several ranks should not all be in memory at once."""
        wanted = {other for name in names for other in self._targets[name].names}
        waiting: dict[str, Tensor] = {}
        for name, tensor in snapshot.tensors(wanted):
            waiting[name] = tensor
            target = self._targets[name]
            if all(other in waiting for other in target.names):
                yield target, [waiting.pop(other) for other in target.names]


def plan_direct_loads(model: nn.Module, loaded: OpenSnapshot) -> DirectLoader | None:
    """A loader for the snapshots that follow one that vLLM has just loaded; None if vLLM has to
    load those too."""
    try:
        loader = DirectLoader(find_targets(model))
    except NotPlainError as why:
        _log.info("vLLM goes on loading weights, because of %s", why)
        return None
    if not loader.fits(loaded) or not loader.agrees(loaded):
        _log.info("vLLM goes on loading weights: it makes others of those that are published")
        return None
    for module in model.modules():
        if type(module) is VocabParallelEmbedding:
            # vLLM has packed it too: as much memory again, for nothing.
            module.cpu_linear = None  # type: ignore[assignment]
    return loader
