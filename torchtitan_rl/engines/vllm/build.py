"""How vLLM is set up: the settings every run needs, and why."""

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

from torchtitan_rl.config.generator import EngineConfig
from torchtitan_rl.engines.vllm.routing import engine_options
from torchtitan_rl.platform import device_type, release_freed_memory, resolve_dtype


def build_llm_engine(model: str, config: EngineConfig, tensor_parallel: int) -> Any:
    """The bare vLLM engine, in this process, with the settings every run needs."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if device_type() == "cpu":
        import torchtitan_rl.engines.vllm.cpu.kernels  # noqa: F401 - before all else of vLLM
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    sharing = None
    # Routing is recorded of tokens that are computed: of copied ones there is none.
    if device_type() == "cpu" and not config.return_routed_experts:
        from torchtitan_rl.engines.vllm.cpu.prompt_sharing import share_prompts

        sharing = share_prompts()

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
        kv_transfer_config=sharing,
        trust_remote_code=False,
        **(engine_options() if config.return_routed_experts else {}),
    )
    with _unnamed_locks():
        engine = LLMEngine.from_engine_args(args)
    if device_type() == "cpu" and tensor_parallel == 1:
        from torchtitan_rl.engines.vllm.cpu.layers import flatten_layers

        engine.apply_model(flatten_layers)
    release_freed_memory()
    return engine


@contextlib.contextmanager
def _unnamed_locks() -> Iterator[None]:
    """Locks that vLLM and tqdm make meanwhile have no name in /dev/shm, where they would stay when
    this process is killed. Monarch's workers start processes by `spawn`, which needs the names;
    these locks are for processes that vLLM starts in its own way, if at all."""
    method = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(method, force=True)
