"""New weights straight into a plain vLLM model on a CPU; `vllm_places` says what is plain.

vLLM's own `reload_weights` takes a model apart and puts it together again, which takes several
times as long as to copy and pack its weights.
"""

import logging
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from torchtitan_rl.engines.vllm.cpu.places import NotPlainError, Place, find_places
from torchtitan_rl.weight_sync.reading import OpenSnapshot

_log = logging.getLogger(__name__)


class DirectLoader:
    """Knows where each tensor of a snapshot goes in a model.

    Example:
        loader = plan_direct_loads(model, first)  # which vLLM has loaded
        if loader is not None and loader.fits(second):
            loader.load(second, second.handle.changed_since(first.handle))
    """

    def __init__(self, places: list[Place]) -> None:
        self._places = {name: place for place in places for name in place.names}
        self._expected = {
            name: (shape, torch.float32)
            for place in places
            for name, shape in zip(place.names, place.shapes, strict=True)
        }

    def fits(self, snapshot: OpenSnapshot) -> bool:
        """Whether it has all tensors of the model and no others, in fp32."""
        return snapshot.handle.tensors() == self._expected

    def agrees(self, snapshot: OpenSnapshot) -> bool:
        """Whether the model is what this would make of a snapshot that vLLM has loaded. Some models
        change weights as they load them, and their modules tell nothing of it."""
        return all(place.has(tensors) for place, tensors in self._deal(snapshot, self._places))

    def load(self, snapshot: OpenSnapshot, names: Iterable[str]) -> None:
        """Have the model serve these tensors of a snapshot that fits."""
        for place, tensors in self._deal(snapshot, names):
            place.put(tensors)

    def _deal(
        self, snapshot: OpenSnapshot, names: Iterable[str]
    ) -> Iterator[tuple[Place, list[Tensor]]]:
        """Places and what goes there, each as soon as it is complete: tensors that are put together
        of several ranks' parts should not all be in memory at once."""
        wanted = {other for name in names for other in self._places[name].names}
        waiting: dict[str, Tensor] = {}
        for name, tensor in snapshot.tensors(wanted):
            waiting[name] = tensor
            place = self._places[name]
            if all(other in waiting for other in place.names):
                yield place, [waiting.pop(other) for other in place.names]


def plan_direct_loads(model: nn.Module, loaded: OpenSnapshot) -> DirectLoader | None:
    """Of what comes after a snapshot that vLLM has just loaded; None if only vLLM can load that."""
    try:
        loader = DirectLoader(find_places(model))
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
