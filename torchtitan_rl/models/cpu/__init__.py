"""Kernels and autograd functions for training on a CPU."""
