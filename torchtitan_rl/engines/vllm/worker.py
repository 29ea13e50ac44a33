"""vLLM's worker, extended: it pulls published weights, and records the experts it chose.

Runs inside vLLM's own process(es). Only `engine.py`, `required.py`, `shared_memory.py`,
`cpu_sleep.py`, `routing_recorder.py`, `slices.py`, the modules under `cpu` and this one touch
vLLM's insides; they are for vLLM 0.32.
"""

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.config import set_current_vllm_config

from torchtitan_rl.engines.vllm import cpu, required
from torchtitan_rl.engines.vllm.cpu_sleep import add_sleep_mode
from torchtitan_rl.engines.vllm.routing_recorder import RoutingRecorder
from torchtitan_rl.engines.vllm.shared_memory import unlink_shared_memory_early
from torchtitan_rl.platform import RELEASE_EVERY, memory_in_use, release_freed_memory
from torchtitan_rl.weight_sync.handle import WeightHandle
from torchtitan_rl.weight_sync.reading import OpenSnapshot, open_snapshot
from torchtitan_rl.weight_sync.receiving import Wanted

if TYPE_CHECKING:
    from torchtitan_rl.engines.vllm.cpu.direct_load import DirectLoader
    from torchtitan_rl.engines.vllm.slices import Slices, Tensors

required.compile_nothing()
cpu.apply()  # in every process that has a part of the model
unlink_shared_memory_early()
add_sleep_mode()
LARGE = 2**26
"""Bytes of weights from which on their memory is worth giving back."""


def _close(fetching: "Future[OpenSnapshot]") -> None:
    """Close what was fetched, if it was."""
    if fetching.exception() is None:
        fetching.result().close()


class WorkerExtension:
    """Mixed into vLLM's worker class (`worker_extension_cls`), one per tensor-parallel rank."""

    staged: OpenSnapshot | None = None
    served: WeightHandle | None = None
    """The weights that the model has; None: those of its folder or, after a sleep, none."""
    direct: "DirectLoader | None" = None
    """Loads weights faster than vLLM, which has to load the first; None: vLLM loads them."""
    slices: "Slices | None" = None
    """What this rank loads of each tensor; None: whole tensors."""
    traced: "Tensors | None" = None
    """The tensors that this was found out for."""
    fetching: "Future[OpenSnapshot] | None" = None
    """A snapshot that is being received, to be staged."""
    received_bytes = 0
    """Bytes that were sent to this rank for the staged snapshot, or the last one."""

    def start_fetching(self, handle: WeightHandle) -> None:
        """Receive and check a published snapshot, beside the steps of the engine."""
        self.drop_staged()
        wanted, fetching = self._wanted(handle), Future[OpenSnapshot]()

        def fetch() -> None:
            try:
                fetching.set_result(self._open(handle, wanted))
            except BaseException as error:
                fetching.set_exception(error)

        threading.Thread(target=fetch, name="weights", daemon=True).start()
        self.fetching = fetching

    def has_fetched(self) -> bool:
        """Whether what was to be fetched is here, or has failed."""
        return self.fetching is None or self.fetching.done()

    def stage_weights(self, handle: WeightHandle) -> None:
        """Open and check a published snapshot, unless it was fetched; the model is not touched."""
        fetching, self.fetching = self.fetching, None
        self.drop_staged()
        self.staged = fetching.result() if fetching else self._open(handle, self._wanted(handle))
        self.received_bytes = self.staged.received

    def drop_staged(self) -> None:
        """Close the staged snapshot, if there is one."""
        if self.fetching is not None:
            self.fetching.add_done_callback(_close)
        if self.staged is not None:
            self.staged.close()
        self.staged = self.fetching = None

    def _wanted(self, handle: WeightHandle) -> Wanted:
        """What this rank has to load to serve a snapshot."""
        runner, config = self.model_runner, self.vllm_config  # type: ignore[attr-defined]
        tensors = handle.tensors()
        if config.parallel_config.world_size > 1 and tensors != self.traced:
            from torchtitan_rl.engines.vllm.slices import trace_slices

            with torch.inference_mode(), set_current_vllm_config(config):
                self.slices = trace_slices(runner.get_model(), tensors, runner.device)
            self.traced = tensors
        names = frozenset(handle.changed_since(self.served))
        return Wanted(names, self.slices.boxes if self.slices else None, runner.device)

    def _open(self, handle: WeightHandle, wanted: Wanted) -> OpenSnapshot:
        snapshot = open_snapshot(handle, wanted)
        try:
            snapshot.verify(set(wanted.names or ()), threads=torch.get_num_threads())
        except BaseException:
            snapshot.close()
            raise
        return snapshot

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

    def forget_served(self) -> None:
        """Note that the model is about to lose its weights: all of the next are to be loaded."""
        self.served = None

    def memory_in_use(self) -> int:
        """Bytes of memory that this rank holds; see `platform.memory_in_use`."""
        return memory_in_use()

    def _reload(self, snapshot: OpenSnapshot, names: set[str]) -> None:
        """Load by vLLM's own loader, which takes this rank's slice of each tensor."""
        runner, config = self.model_runner, self.vllm_config  # type: ignore[attr-defined]
        model = runner.get_model()
        self.direct = None  # it knew the model as it was
        with set_current_vllm_config(config):
            required.repack_experts(model, names)
            weights = self.slices.weights(snapshot, names) if self.slices else None
            runner.reload_weights(weights_iterator=weights or snapshot.tensors(names))
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
