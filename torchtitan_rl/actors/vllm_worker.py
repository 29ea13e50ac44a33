"""What vLLM's worker learns from us: to pull published weights, and to record the experts it chose.

Runs inside vLLM's own process(es).

With `engine.py` and `vllm_routing.py` the only module that touches vLLM's insides; for vLLM 0.32.
"""

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from torchtitan_rl.actors.vllm_routing import RoutingRecorder
from torchtitan_rl.platform import device_type
from torchtitan_rl.weight_sync.handle import WeightHandle, check_fresh, fetch


class WorkerExtension:
    """Mixed into vLLM's worker class (`worker_extension_cls`), one per tensor-parallel rank."""

    def pull_weights(self, handle: WeightHandle) -> None:
        """Load a published snapshot through vLLM's own loader, which takes each rank's slice."""
        runner, config = self.model_runner, self.vllm_config  # type: ignore[attr-defined]
        with set_current_vllm_config(config), torch.inference_mode():
            _repack_experts(runner.get_model())
            runner.reload_weights(weights_iterator=fetch(handle))
            # The loader keeps views until a layer is complete, so only now is it known that
            # nothing was read from a buffer that is being rewritten.
            check_fresh(handle)
            # On a CPU fp32 Linears are packed at load. The reload repacks them, except a tied
            # lm_head, which would silently go on serving the old weights.
            for module in runner.get_model().modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)

    def record_routing(self) -> None:
        """From now on, remember the experts every token goes to."""
        self.routing_recorder = RoutingRecorder(self.model_runner)  # type: ignore[attr-defined]

    def take_routing(self, request_id: str) -> np.ndarray:
        """[tokens, layers with experts, top_k] of a finished request."""
        return self.routing_recorder.take(request_id)

    def drop_routing(self, request_ids: list[str]) -> None:
        """Forget requests that were aborted."""
        self.routing_recorder.drop(request_ids)


def _repack_experts(model: torch.nn.Module) -> None:
    """On a CPU, have experts packed again when they are reloaded; else they are garbage, silently.

    vLLM packs them only for a kernel it has just made, and a reload keeps the kernel. A GPU needs
    no packing, and its CUDA graphs hold on to the kernel.
    """
    for module in model.modules():
        if isinstance(module, RoutedExperts) and device_type() == "cpu":
            module.quant_method.moe_kernel = None
