"""vLLM's worker, extended: it pulls published weights, and records the experts it chose.

Runs inside vLLM's own process(es). Only `engine.py`, `required.py`, `shared_memory.py`,
`routing_recorder.py`, the modules under `cpu` and this one touch vLLM's insides; they are for vLLM
0.32.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.config import set_current_vllm_config

from torchtitan_rl.engines.vllm import cpu, required
from torchtitan_rl.engines.vllm.routing_recorder import RoutingRecorder
from torchtitan_rl.engines.vllm.shared_memory import unlink_shared_memory_early
from torchtitan_rl.platform import RELEASE_EVERY, release_freed_memory
from torchtitan_rl.weight_sync.handle import WeightHandle
from torchtitan_rl.weight_sync.reading import OpenSnapshot, open_snapshot

if TYPE_CHECKING:
    from torchtitan_rl.engines.vllm.cpu.direct_load import DirectLoader

required.compile_nothing()
cpu.apply()  # in every process that has a part of the model
unlink_shared_memory_early()
LARGE = 2**26
"""Bytes of weights from which on their memory is worth giving back."""


class WorkerExtension:
    """Mixed into vLLM's worker class (`worker_extension_cls`), one per tensor-parallel rank."""

    staged: OpenSnapshot | None = None
    served: WeightHandle | None = None
    """The weights that the model has; None: those of its folder."""
    direct: "DirectLoader | None" = None
    """Loads weights faster than vLLM, which has to load the first; None: vLLM loads them."""

    def stage_weights(self, handle: WeightHandle) -> None:
        """Open and check a published snapshot; the model is not touched."""
        self.drop_staged()
        snapshot = open_snapshot(handle)
        try:
            snapshot.verify(handle.changed_since(self.served), threads=torch.get_num_threads())
        except BaseException:
            snapshot.close()
            raise
        self.staged = snapshot

    def drop_staged(self) -> None:
        """Close the staged snapshot, if there is one."""
        if self.staged is not None:
            self.staged.close()
        self.staged = None

    def load_staged(self) -> None:
        """Load the staged snapshot into the model; weights that have not changed stay."""
        assert self.staged is not None
        handle = self.staged.handle
        names = handle.changed_since(self.served)
        with torch.inference_mode():
            if self.direct is not None and self.direct.fits(self.staged):
                self.direct.load(self.staged, names)
            elif names:
                self._reload(self.staged, names)
        self.served = handle
        self.drop_staged()
        # Packed matrices do not fit where the ones before them were. A small model's may stay for a
        # while: to fault pages in again takes as long as to load it.
        if handle.nbytes >= LARGE or handle.version % RELEASE_EVERY == 0:
            release_freed_memory()

    def _reload(self, snapshot: OpenSnapshot, names: set[str]) -> None:
        """Load by vLLM's own loader, which takes this rank's slice of each tensor."""
        runner, config = self.model_runner, self.vllm_config  # type: ignore[attr-defined]
        model = runner.get_model()
        self.direct = None  # it knew the model as it was
        with set_current_vllm_config(config):
            required.repack_experts(model, names)
            runner.reload_weights(weights_iterator=snapshot.tensors(names))
            required.repack_tied_head(model, names)
        alone = config.parallel_config.world_size == 1
        # Only after the first load are all weights the snapshot's.
        if alone and self.served is None and cpu.is_active("direct_load"):
            from torchtitan_rl.engines.vllm.cpu.direct_load import plan_direct_loads

            self.direct = plan_direct_loads(model, snapshot)

    def record_routing(self) -> None:
        """Record the experts of every token from now on."""
        self.routing_recorder = RoutingRecorder(self.model_runner)  # type: ignore[attr-defined]

    def take_routing(self, request_id: str) -> np.ndarray:
        """Experts [tokens, layers with experts, top_k] of a finished request."""
        return self.routing_recorder.take(request_id)

    def drop_routing(self, request_ids: list[str]) -> None:
        """Discard the records of requests that were aborted."""
        self.routing_recorder.drop(request_ids)
