"""What vLLM 0.32 needs on a CPU to be right at all; nothing here is for speed.

Further needs are one setting each, beside the setting: no prefill in parts (`build.py`).
"""

import contextlib
import multiprocessing
from collections.abc import Iterator

import torch
from vllm.platforms import current_platform

from torchtitan_rl.platform import device_type

HEADS = {"lm_head.weight", "model.embed_tokens.weight"}
"""Names of the weights that an output layer may be made of."""


def compile_nothing() -> None:
    """On a CPU, have vLLM run its helpers without compiling them: else the first request waits
    4-24 s for a compiler, which may not be installed. Must run before other modules of vLLM are
    imported."""
    if device_type() == "cpu":
        type(current_platform).simple_compile_backend = "eager"


@contextlib.contextmanager
def unnamed_locks() -> Iterator[None]:
    """While open, locks that vLLM and tqdm make have no name in /dev/shm, where they would stay
    when this process is killed.

    Our workers start processes by `forkserver` (platform/worker_main.py), which needs the names;
    these locks are for processes that vLLM starts in its own way, if at all.
    """
    method = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(method, force=True)


def repack_experts(model: torch.nn.Module, names: set[str]) -> None:
    """On a CPU, have experts packed again when these weights are reloaded: else they are garbage,
    silently.

    vLLM packs experts only for a kernel that it has just made, and a reload keeps the kernel. A GPU
    needs no packing, and its CUDA graphs hold on to the kernel.
    """
    if device_type() != "cpu":
        return
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    reloaded = {name.partition(".experts.")[0] for name in names}
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts) and name.partition(".experts")[0] in reloaded:
            module.quant_method.moe_kernel = None


def repack_tied_head(model: torch.nn.Module, names: set[str]) -> None:
    """Pack the output layer again after these weights were reloaded. On a CPU fp32 matrices are
    packed at load; vLLM's reload repacks them, except a tied lm_head, which would silently go on
    with the old weights."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules() if names & HEADS else ():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
