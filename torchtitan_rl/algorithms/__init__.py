"""Advantages, policy losses, KL estimates, off-policy corrections and echo: pure functions."""
