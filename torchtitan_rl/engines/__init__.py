"""Inference engines behind the generator."""
