"""What vLLM's worker learns from us: to pull published weights. Runs inside vLLM's own process(es).

The only module, with `engine.py`, that touches vLLM's insides; written against vLLM 0.32.
"""

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from torchtitan_rl.weight_sync.handle import WeightHandle, check_fresh, fetch


class WeightPuller:
    """Mixed into vLLM's worker class (`worker_extension_cls`), one per tensor-parallel rank."""

    def pull_weights(self, handle: WeightHandle) -> None:
        """Load a published snapshot through vLLM's own loader, which takes each rank's slice."""
        runner, config = self.model_runner, self.vllm_config  # type: ignore[attr-defined]
        with set_current_vllm_config(config), torch.inference_mode():
            runner.reload_weights(weights_iterator=fetch(handle))
            # The loader keeps views until a layer is complete, so only now is it known that
            # nothing was read from a buffer that is being rewritten.
            check_fresh(handle)
            # On a CPU fp32 Linears are packed at load. The reload repacks them, except a tied
            # lm_head, which would silently go on serving the old weights.
            for module in runner.get_model().modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
