"""Settings that Monarch and torchtitan read once, at import, and that must be made before it.

Packages whose modules import one of them call `prepare` in their `__init__`, which runs first.
"""

import importlib.abc
import os
import sys
import warnings
from typing import Any

MONARCH_SETTINGS = {
    # How soon a dead worker is noticed; 10 s by default.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
    # How long a new process, and an actor on it, may take to show up; 30 s by default, which a busy
    # machine can miss.
    "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE": "60s",
    "HYPERACTOR_MESH_ACTOR_SPAWN_MAX_IDLE": "120s",
}
"""Environment variables; one that the user has set stays as it is."""


class _AdaptTorchtitan(importlib.abc.MetaPathFinder):
    """Adapts torchtitan to this machine just before it is imported, and not earlier: adapting it
    imports torch, which a grader never needs."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchtitan":
            from torchtitan_rl.platform import adapt_torchtitan

            adapt_torchtitan()


def prepare() -> None:
    """Set what Monarch reads from the environment, have torchtitan adapted when it is imported, and
    keep notebooks quiet. May be called any number of times."""
    for name, value in MONARCH_SETTINGS.items():
        os.environ.setdefault(name, value)
    # tqdm's, in a notebook without ipywidgets; nothing of ours shows a bar by it.
    warnings.filterwarnings("ignore", "IProgress not found")
    if any(isinstance(finder, _AdaptTorchtitan) for finder in sys.meta_path):
        return
    if "torchtitan" in sys.modules:
        _check_device()
    sys.meta_path.insert(0, _AdaptTorchtitan())


def _check_device() -> None:
    """Refuse a torchtitan that was imported too early to know that there is no GPU here."""
    from torchtitan_rl.platform import device_type

    chosen = getattr(sys.modules.get("torchtitan.tools.utils"), "device_type", "cpu")
    if chosen != device_type():
        raise ImportError(
            f"torchtitan was imported before torchtitan_rl.models and expects {chosen!r}, but this "
            f"machine is used as {device_type()!r}: import torchtitan_rl.models first"
        )
