"""Architectures: a file for each, with what its config.json may say and what sets it apart."""
