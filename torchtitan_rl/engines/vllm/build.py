"""How vLLM is set up: the settings every run needs, and why."""

import os
from typing import Any

from torchtitan_rl.config.generator import EngineConfig
from torchtitan_rl.engines.vllm.routing import engine_options
from torchtitan_rl.platform import device_type, release_freed_memory, resolve_dtype


def build_llm_engine(model: str, config: EngineConfig, tensor_parallel: int) -> Any:
    """The bare vLLM engine, in this process, with the settings every run needs."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from torchtitan_rl.engines.vllm import cpu, required

    required.compile_nothing()  # before all else of vLLM
    cpu.apply()
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    args = EngineArgs(
        model=model,
        dtype=resolve_dtype(config.dtype),
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30),
        tensor_parallel_size=tensor_parallel,
        enforce_eager=config.enforce_eager or device_type() == "cpu",
        # After temperature (and nothing else: the trainer divides its logits the same way).
        logprobs_mode="processed_logprobs",
        worker_extension_cls="torchtitan_rl.engines.vllm.worker.WorkerExtension",
        disable_log_stats=True,
        enable_prefix_caching=True,
        # On a CPU vLLM dies when it prefills a prompt with a seed in parts: it then sets back the
        # generator's offset, which a CPU's has not. Whole prompts always fit the batch.
        enable_chunked_prefill=device_type() != "cpu",
        trust_remote_code=False,
        **cpu.engine_options(config),
        **(engine_options() if config.return_routed_experts else {}),
    )
    with required.unnamed_locks():
        engine = LLMEngine.from_engine_args(args)
    release_freed_memory()
    return engine
