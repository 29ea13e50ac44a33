"""Python's garbage collector, set for a run."""

import gc

from torchtitan_rl.platform.switches import enabled


def collect_garbage_rarely() -> None:
    """Have this process look for garbage after 50,000 new objects, not 700, and hardly ever
    through all there are.

    A batch is many thousands of short lists, none of them garbage, beside a million objects of
    imports: looking through these again and again takes longer than making the batch.
    """
    if enabled("garbage"):
        gc.set_threshold(50_000, 10, 1000)
