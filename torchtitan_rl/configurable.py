"""torchtitan's `Configurable`, without torch: a grader needs none, and importing it takes longer
than everything else that a grader does before it grades.

`torchtitan.config` imports torch for what else is in it, and `Configurable` itself only to trace
how long `build` takes. So the one file is loaded, under its own name: who imports
`torchtitan.config` later finds the same class.
"""

import contextlib
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

_NAME = "torchtitan.config.configurable"
_TRACING = "torchtitan.observability"


class _Tracing(ModuleType):
    """Stands for the module that traces, as long as there is no torch."""

    structured_logger: Any

    @staticmethod
    def log_trace_span(name: str) -> Any:
        if "torch" not in sys.modules:
            return contextlib.nullcontext()
        from torchtitan.observability import structured_logger

        return structured_logger.log_trace_span(name)


def _load() -> ModuleType:
    found = PathFinder.find_spec("torchtitan")  # which imports nothing
    assert found is not None
    assert found.submodule_search_locations is not None
    folder = Path(found.submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location(_NAME, folder / "config" / "configurable.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    tracing = _Tracing(_TRACING)
    tracing.structured_logger = tracing
    sys.modules[_TRACING] = tracing
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[_TRACING]
    sys.modules[_NAME] = module
    return module


if TYPE_CHECKING or "torch" in sys.modules:
    from torchtitan.config import Configurable
else:
    Configurable = (sys.modules.get(_NAME) or _load()).Configurable

__all__ = ["Configurable"]
