"""Inference engines that generators sample with."""
