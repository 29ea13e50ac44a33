"""Which FlashAttention trains on a GPU: the fastest that is installed, else the one inside torch.

FlashAttention 2 is part of torch's CUDA build. 3 (Hopper) and 4 (Hopper and Blackwell) are packages
of their own, which torch 2.13 can put in its place. Without them these GPUs train all the same.
"""

import importlib.util
from collections.abc import Callable
from functools import cache

BUILT_IN = "FA2"
BY_CAPABILITY = {9: ("FA3", "FA4"), 10: ("FA4",)}
"""Kernels that beat the built-in one, by the major compute capability of the GPUs that they are
made for, the best first. Others, such as the consumer cards of 12.x, have only the built-in one."""
MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}
"""Modules that torch imports for a kernel: those of flash-attention's packages."""


def choose_kernel(capability: tuple[int, int], installed: Callable[[str], bool]) -> str:
    """The kernel for a GPU of this compute capability, among those whose module is `installed`.

    Example:
        >>> choose_kernel((9, 0), lambda module: False)
        'FA2'
        >>> choose_kernel((9, 0), lambda module: True)
        'FA3'
    """
    better = BY_CAPABILITY.get(capability[0], ())
    return next((kernel for kernel in better if installed(MODULES[kernel])), BUILT_IN)


def is_installed(module: str) -> bool:
    """Whether a module can be found; it is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it lies in
        return False


@cache
def activate_kernel() -> str:
    """Have torch use the best kernel for this process's GPU from now on; returns its name."""
    import torch
    from torch.nn.attention import activate_flash_attention_impl

    if not torch.cuda.is_available():  # a trace: shapes are the same with every kernel
        return BUILT_IN
    kernel = choose_kernel(torch.cuda.get_device_capability(), is_installed)
    if kernel == BUILT_IN:
        return kernel
    try:
        activate_flash_attention_impl(kernel)
    except (ImportError, RuntimeError, OSError) as error:  # built for another torch or CUDA
        raise RuntimeError(
            f"{MODULES[kernel]} is installed but does not work here: {error}. Reinstall it for "
            f"torch {torch.__version__}, or uninstall it: torch's own FlashAttention 2 is then used"
        ) from error
    return kernel
