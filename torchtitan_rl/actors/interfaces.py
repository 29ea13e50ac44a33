"""Contracts between the actors and whoever calls them: what is asked, what is answered."""

from dataclasses import dataclass
from typing import Literal

from torchtitan_rl.config.sampling import SamplingConfig
from torchtitan_rl.core.types import Completion


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One completion that is wanted of the generators."""

    prompt_token_ids: list[int]
    sampling: SamplingConfig
    """How to sample it; its `n` is 1."""
    group_id: str
    """Requests of one group go to one generator, as long as its cache of their prefix is good."""
    seed_name: str
    """With the run's seed and `seed_number`, what the sample's own seed derives from."""
    seed_number: int = 0


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """A request that came to nothing."""

    kind: Literal["failed", "empty"]
    reason: str


Sample = Completion | SampleFailure
"""What becomes of a SampleRequest."""
