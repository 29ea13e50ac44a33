"""Samples of a prompt copy its last block of the KV cache, in place of computing it each.

vLLM's samples of one prompt share what fills whole blocks of the KV cache, and compute the rest,
up to a block of tokens, each for itself. On a GPU nobody notices; on a CPU it takes as long as some
steps of decoding. Here the first sample of a prompt computes the rest, and the others that start in
the same engine step copy its block, layer by layer, between the layer's cache update and its
attention. Built as one of vLLM's connectors, which bring keys and values from elsewhere: here, from
another request.

Gain of a whole step: 0 % (tiny), 10 % (135M) (vLLM 0.32.0, two cores of an AMD EPYC with
AVX-512).
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


def copy_blocks() -> KVTransferConfig:
    """The engine argument (`kv_transfer_config`) by which samples copy the blocks of others."""
    return KVTransferConfig(
        kv_connector=BlockCopier.__name__,
        kv_connector_module_path=__name__,
        kv_role="kv_consumer",
    )


@dataclass(slots=True)
class BlockCopies(KVConnectorMetadata):
    """Copies of one engine step: block `sources[i]` to block `targets[i]`."""

    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)


class BlockCopier(KVConnectorBase_V1):
    """A connector: one instance plans copies beside the scheduler, one in every worker copies.

    Example:
        blocks of 32 tokens, a prompt of 56, 4 samples: the first computes 56 tokens; the others
        share its first block, copy its second, and compute the last token, to sample from it
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if vllm_config.scheduler_config.enable_chunked_prefill:
            raise ValueError("a prompt that is computed in parts is not there to be copied")
        self._block_size = vllm_config.cache_config.block_size
        self._first: dict[tuple[int, ...], int] = {}
        """The last block of the request that computes a prompt in this engine step, by prompt."""
        self._copies = BlockCopies()
        self._caches: dict[str, torch.Tensor] = {}

    # ---- beside the scheduler -----------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens of a request can be copied: all but the last, from which the next one is
        sampled, if another request computes the same tokens in this step; else none."""
        tokens = request.num_tokens
        lacks_one_block = num_computed_tokens >= self._last_block(tokens) * self._block_size
        if lacks_one_block and tuple(request.all_token_ids) in self._first:
            return tokens - 1 - num_computed_tokens, False
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        (ids,) = blocks.get_block_ids()
        block = ids[self._last_block(request.num_tokens)]
        first = self._first.setdefault(tuple(request.all_token_ids), block)
        if num_external_tokens:
            self._copies.sources.append(first)
            self._copies.targets.append(block)

    def build_connector_meta(self, scheduler_output: Any) -> BlockCopies:
        planned, self._copies = self._copies, BlockCopies()
        self._first.clear()  # later on, its request may have ended, and its block hold another's
        return planned

    def _last_block(self, tokens: int) -> int:
        return (tokens - 1) // self._block_size

    # ---- in a worker --------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep the caches, by layer: [blocks, ...]."""
        if self._caches:  # vLLM has one connector for all engines of a process
            raise RuntimeError("there can be one engine in a process: close the other one first")
        self._caches = kv_caches

    def has_connector_metadata(self) -> bool:
        """Whether there is something to copy: vLLM asks in every layer."""
        return isinstance(self._connector_metadata, BlockCopies) and bool(
            self._connector_metadata.sources
        )

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Copy the blocks of a layer. vLLM calls this when the layer's keys and values of the step
        are in the cache, and before they are read. A copied block also has the last token's; they
        are those of the same token."""
        planned, cache = self._get_connector_metadata(), self._caches[layer_name]
        assert isinstance(planned, BlockCopies)
        cache[planned.targets] = cache[planned.sources]

    # Nothing is fetched ahead, and nothing is kept for others.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
