"""Narrow actors for reinforcement learning of language models, PyTorch-native from end to end.

torchtitan trains, vLLM generates, Monarch carries. Start reading at `controller.py`.
"""

from torchtitan_rl.platform import adapt_torchtitan

adapt_torchtitan()

__version__ = "0.1.0"
