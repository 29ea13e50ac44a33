"""Narrow actors for reinforcement learning of language models, PyTorch-native from end to end.

torchtitan trains, vLLM generates, Monarch carries. Start reading at `controller.py`.
"""

import importlib.abc
import os
import sys
from typing import Any

# Read once when Monarch is imported: how soon a dead worker is noticed (10 s by default), and how
# long a new one may take to show up (30 s by default, which a busy machine can miss; spawn.py tries
# twice).
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")
os.environ.setdefault("HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE", "60s")
os.environ.setdefault("HYPERACTOR_MESH_ACTOR_SPAWN_MAX_IDLE", "120s")


class _AdaptTorchtitan(importlib.abc.MetaPathFinder):
    """Adapts torchtitan to this machine just before it is imported, and not earlier: that imports
    torch, which `torchtitan_rl.view` must not wait for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchtitan":
            from torchtitan_rl.platform import adapt_torchtitan

            adapt_torchtitan()


sys.meta_path.insert(0, _AdaptTorchtitan())

__version__ = "0.1.0"
