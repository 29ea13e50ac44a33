"""Machines of a run: a worker process on each, and the controller's connection to it."""
