"""Rare garbage collection: most objects of a worker or a controller stay for the whole run."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (50_000, 10, 10)
"""Objects that are made between two collections, and how many of these make an older generation
due. Python's own are (700, 10, 10)."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Inside the block Python looks for garbage rarely, and not at the objects that are there
    already.

    A step of 4,096 episodes makes so many objects that Python would go through all of them, and
    through those of torch, several times a step: a third of the controller's time.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
