"""Narrow actors for reinforcement learning of language models, PyTorch-native from end to end.

torchtitan trains, vLLM generates, Monarch carries. Start reading at `controller.py`.
"""

import os

from torchtitan_rl.platform import adapt_torchtitan

# Read once when Monarch is imported: how soon a dead worker is noticed (10 s by default).
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")
adapt_torchtitan()

__version__ = "0.1.0"
