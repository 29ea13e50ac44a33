"""Kernels for training on a GPU: which are there, and how they are called."""
