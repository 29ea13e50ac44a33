"""How vLLM is set up: the settings every run needs, and why."""

import gc
import math
import os
from typing import Any

from torchtitan_rl.config.generator import EngineConfig
from torchtitan_rl.engines.vllm.routing import engine_options
from torchtitan_rl.models.hf import has_weights, tensor_shapes
from torchtitan_rl.platform import device_type, release_freed_memory, resolve_dtype
from torchtitan_rl.platform.nvml import read_driver

BESIDE_GIB = 2.0
"""Memory of a GPU that an engine takes beside weights and KV cache: CUDA itself, its graphs, and
the activations of a step."""


def build_llm_engine(model: str, config: EngineConfig, tensor_parallel: int) -> Any:
    """The bare vLLM engine, in this process, with the settings every run needs."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from torchtitan_rl.engines.vllm import cpu, required

    required.compile_nothing()  # before all else of vLLM
    cpu.apply()
    from vllm.v1.engine.llm_engine import LLMEngine

    # vLLM looks for garbage five times as it loads a model. In what was imported there is none, and
    # to go through it takes a quarter of the start.
    gc.freeze()
    with required.unnamed_locks():
        engine = LLMEngine.from_engine_args(engine_args(model, config, tensor_parallel))
    release_freed_memory()
    return engine


def engine_args(model: str, config: EngineConfig, tensor_parallel: int) -> Any:
    """vLLM's arguments for these settings on this machine."""
    from vllm import EngineArgs

    return EngineArgs(
        model=model,
        load_format="auto" if has_weights(model) else "dummy",
        dtype=resolve_dtype(config.dtype),
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30),
        **memory_options(model, config, tensor_parallel),
        tensor_parallel_size=tensor_parallel,
        enforce_eager=config.enforce_eager or device_type() == "cpu",
        # After temperature (and nothing else: the trainer divides its logits the same way).
        logprobs_mode="processed_logprobs",
        worker_extension_cls="torchtitan_rl.engines.vllm.worker.WorkerExtension",
        disable_log_stats=True,
        enable_prefix_caching=True,
        # On a CPU, where vLLM would refuse it, every worker can sleep: see cpu_sleep.py.
        enable_sleep_mode=config.can_sleep and device_type() == "cuda",
        # On a CPU vLLM dies when it prefills a prompt with a seed in parts: it then sets back the
        # generator's offset, which a CPU's has not. Whole prompts always fit the batch.
        enable_chunked_prefill=device_type() != "cpu",
        trust_remote_code=False,
        **(engine_options() if config.return_routed_experts else {}),
    )


def memory_options(model: str, config: EngineConfig, tensor_parallel: int) -> dict[str, float]:
    """The share of a GPU's memory that must be free as the engine starts: what it is going to take.

    vLLM asks for 92 % otherwise, though the size of the KV cache is given.
    """
    driver = read_driver() if device_type() == "cuda" else None
    totals = [gpu.total for gpu in driver.gpus if gpu.total] if driver else []
    if not totals:
        return {}
    size = 4 if resolve_dtype(config.dtype) == "float32" else 2
    weights = size * sum(map(math.prod, tensor_shapes(model).values())) / tensor_parallel
    needed = weights + (config.kv_cache_gib + BESIDE_GIB) * 2**30
    # More than all: vLLM says then, in words, what is missing.
    return {"gpu_memory_utilization": min(1.0, needed / min(totals))}
