"""Kernels and autograd functions for training on a CPU: one file each.

Each file's header says what its part gains: the time of a whole step without it / with it - 1.
`TORCHTITAN_RL_WITHOUT` switches single ones off.
"""
