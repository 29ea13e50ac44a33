"""Where the processes of an actor run."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """How many processes an actor has, and which GPUs they see.

    Every process is on this host as yet; a host would be one more field.
    """

    processes: int = 1
    gpus: Sequence[int] | None = None
    """Numbers of the GPUs that the processes may use; None: all there are."""
