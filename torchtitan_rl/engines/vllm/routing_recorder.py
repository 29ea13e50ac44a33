"""Records, inside vLLM's worker on a CPU, which experts every token of every request went to."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from torchtitan_rl.core.experts import expert_dtype


@dataclass(slots=True)
class _Record:
    """The rows of one request so far, in pieces of an engine step each."""

    pieces: list[np.ndarray] = field(default_factory=list)
    tokens: int = 0

    def add(self, rows: np.ndarray) -> None:
        self.pieces.append(rows)
        self.tokens += len(rows)


class RoutingRecorder:
    """Listens to the routers, and after each forward pass sorts their choices by request.

    A prompt's tokens that were found in the prefix cache are not computed, so no router sees them.
    Their choices are those of whoever filled the cache: every token's are also kept under the slot
    of its keys and values, as long as those live.

    A token that is computed again, after a preemption or a swap of weights, keeps the choices of
    the first time: with those the tokens after it were sampled.
    """

    def __init__(self, runner: Any) -> None:
        model = runner.get_model()
        layers = [module for module in model.modules() if isinstance(module, MoERunner)]
        self._runner = runner
        self._records: dict[str, _Record] = {}
        self._chosen: list[torch.Tensor] = [torch.empty(0)] * len(layers)
        for number, layer in enumerate(sorted(layers, key=lambda layer: layer.layer_id)):
            if layer.is_monolithic or not isinstance(layer.router, BaseRouter):
                raise RuntimeError(
                    f"vLLM's {type(layer.router).__name__} does not tell which experts it chose"
                )
            layer.router.set_capture_fn(partial(self._chosen.__setitem__, number))
        router = layers[0].router
        self._dtype = expert_dtype(router.global_num_experts)
        slots = runner.kv_cache_config.num_blocks * runner.cache_config.block_size
        self._by_slot = np.zeros((slots, len(layers), router.top_k), self._dtype)
        model.register_forward_hook(self._after_forward)

    def take(self, request_id: str) -> np.ndarray:
        """[tokens, layers, top_k] of a request, which is then forgotten."""
        return np.concatenate(self._records.pop(request_id).pieces)

    def drop(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._records.pop(request_id, None)

    def _after_forward(self, *_: Any) -> None:
        batch = self._runner.input_batch
        requests = batch.num_reqs
        starts = batch.num_computed_tokens_cpu[:requests]
        bounds = self._runner.query_start_loc.np[: requests + 1]
        owners = np.repeat(np.arange(requests), np.diff(bounds))
        rows = torch.stack(self._chosen, dim=1)[: bounds[-1]].numpy().astype(self._dtype)
        positions = starts[owners] + np.arange(bounds[-1]) - bounds[owners]
        self._by_slot[self._slots(owners, positions)] = rows
        for index, request_id in enumerate(batch.req_ids):
            # vLLM appends a random part to the id it was given.
            record = self._records.setdefault(request_id.split("-", 1)[0], _Record())
            start, new = starts[index], rows[bounds[index] : bounds[index + 1]]
            if start > record.tokens:
                # Only now: the request that fills these slots may be in the same batch.
                cached = np.arange(record.tokens, start)
                record.add(self._by_slot[self._slots(np.full_like(cached, index), cached)])
            record.add(new[record.tokens - start :])

    def _slots(self, owners: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Where the keys and values of these requests' tokens lie."""
        table = self._runner.input_batch.block_table[0]
        blocks = table.get_numpy_array()[owners, positions // table.block_size]
        return blocks.astype(np.int64) * table.block_size + positions % table.block_size
