"""Narrow actors for reinforcement learning of language models, PyTorch-native from end to end.

torchtitan trains, vLLM generates, Monarch carries. Start reading at `controller.py`.
"""

import os

from torchtitan_rl.platform import adapt_torchtitan

# Read once when Monarch is imported: how soon a dead worker is noticed (10 s by default), and how
# long a new one may take to show up (30 s by default, which a busy machine can miss; spawn.py tries
# twice).
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")
os.environ.setdefault("HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE", "60s")
os.environ.setdefault("HYPERACTOR_MESH_ACTOR_SPAWN_MAX_IDLE", "120s")
adapt_torchtitan()

__version__ = "0.1.0"
