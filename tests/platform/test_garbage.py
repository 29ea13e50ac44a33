"""Garbage collection of the controller."""

import gc

from torchtitan_rl.platform.garbage import THRESHOLDS, rare_collections


def test_collections_are_rare_while_a_run_goes_on_and_as_before_afterwards():
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with rare_collections():
        assert gc.get_threshold() == THRESHOLDS
        assert gc.get_freeze_count() > frozen
        with rare_collections():  # a second run in the same process
            pass
        assert gc.get_threshold() == THRESHOLDS
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
