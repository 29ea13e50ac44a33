"""What vLLM's worker learns from us: to pull published weights, and to record the experts it chose.

Runs inside vLLM's own process(es).

Only `engine.py` and the modules `vllm_*.py` beside it touch vLLM's insides; they are for vLLM 0.32.
"""

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from torchtitan_rl.engines.vllm.routing_recorder import RoutingRecorder
from torchtitan_rl.platform import device_type, release_freed_memory
from torchtitan_rl.weight_sync.handle import WeightHandle
from torchtitan_rl.weight_sync.reading import OpenSnapshot, open_snapshot

if device_type() == "cpu":
    import torchtitan_rl.engines.vllm.cpu.kernels  # noqa: F401 - in every process that has a part of the model
    from torchtitan_rl.engines.vllm.cpu.direct_load import DirectLoader, plan_direct_loads


LARGE = 2**26
"""Bytes of weights whose memory is worth giving back."""


class WorkerExtension:
    """Mixed into vLLM's worker class (`worker_extension_cls`), one per tensor-parallel rank."""

    staged: OpenSnapshot | None = None
    served: WeightHandle | None = None
    """What the model's weights are; None: those of its folder."""
    direct: "DirectLoader | None" = None
    """Loads weights faster than vLLM, which has to load the first; None: it cannot."""

    def stage_weights(self, handle: WeightHandle) -> None:
        """Open and check a published snapshot. Nothing the model serves is touched."""
        self.drop_staged()
        snapshot = open_snapshot(handle)
        try:
            snapshot.verify(handle.changed_since(self.served), threads=torch.get_num_threads())
        except BaseException:
            snapshot.close()
            raise
        self.staged = snapshot

    def drop_staged(self) -> None:
        """Let go of what was staged."""
        if self.staged is not None:
            self.staged.close()
        self.staged = None

    def load_staged(self) -> None:
        """Serve what was staged; what has not changed is left as it is."""
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
        # Packed matrices do not fit where the ones before them were. A small model's may stay: to
        # fault pages in again takes as long as to load it.
        if handle.nbytes >= LARGE:
            release_freed_memory()

    def _reload(self, snapshot: OpenSnapshot, names: set[str]) -> None:
        """vLLM's own loader takes this rank's slice of each tensor."""
        runner, config = self.model_runner, self.vllm_config  # type: ignore[attr-defined]
        model = runner.get_model()
        self.direct = None  # it knew the model as it was
        with set_current_vllm_config(config):
            _repack_experts(model, names)
            runner.reload_weights(weights_iterator=snapshot.tensors(names))
            # On a CPU fp32 Linears are packed at load. The reload repacks them, except a tied
            # lm_head, which would silently go on serving the old weights.
            for module in model.modules() if names & _HEADS else ():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
        alone = device_type() == "cpu" and config.parallel_config.world_size == 1
        if alone and self.served is None:  # so that all weights are the snapshot's
            self.direct = plan_direct_loads(model, snapshot)

    def record_routing(self) -> None:
        """From now on, remember the experts every token goes to."""
        self.routing_recorder = RoutingRecorder(self.model_runner)  # type: ignore[attr-defined]

    def take_routing(self, request_id: str) -> np.ndarray:
        """[tokens, layers with experts, top_k] of a finished request."""
        return self.routing_recorder.take(request_id)

    def drop_routing(self, request_ids: list[str]) -> None:
        """Forget requests that were aborted."""
        self.routing_recorder.drop(request_ids)


_HEADS = {"lm_head.weight", "model.embed_tokens.weight"}
"""What the output layer may be made of."""


def _repack_experts(model: torch.nn.Module, names: set[str]) -> None:
    """On a CPU, have experts packed again when they are reloaded; else they are garbage, silently.

    vLLM packs them only for a kernel it has just made, and a reload keeps the kernel. A GPU needs
    no packing, and its CUDA graphs hold on to the kernel.
    """
    if device_type() != "cpu":
        return
    reloaded = {name.partition(".experts.")[0] for name in names}
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts) and name.partition(".experts")[0] in reloaded:
            module.quant_method.moe_kernel = None
