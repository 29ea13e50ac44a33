"""Patches that make vLLM faster on a CPU: one file each, and all of them can be left out.

Each file's header says what its patch gains: the time of a whole step without it / with it - 1, as
measured for docs/performance.md. They reach into one version of vLLM; with any other none is
applied, and vLLM works as it comes. `TORCHTITAN_RL_WITHOUT` switches single ones off.
"""

import logging
from functools import cache

from torchtitan_rl.platform import device_type
from torchtitan_rl.platform.switches import enabled

WRITTEN_FOR = "0.32.0"
"""The version of vLLM whose insides the patches know."""

_log = logging.getLogger(__name__)


@cache
def apply() -> None:
    """Change vLLM's classes in this process, once; before vLLM builds a model. `direct_load`, which
    changes none, is asked for by the worker."""
    if is_active("norms"):
        from torchtitan_rl.engines.vllm.cpu import norms

        norms.apply()


def is_active(name: str) -> bool:
    """Whether a patch is to be applied on this machine, to this vLLM."""
    return device_type() == "cpu" and _version_is_known() and enabled(name)


@cache
def _version_is_known() -> bool:
    import vllm

    known = vllm.__version__ == WRITTEN_FOR
    if not known:
        _log.warning(
            "vLLM %s runs without our CPU patches, which are for %s: slower, the same results",
            vllm.__version__,
            WRITTEN_FOR,
        )
    return known
