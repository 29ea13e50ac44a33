"""A generator with a per-token field of its own, in two places: a declaration, and the line that
sets it."""

import math
from typing import Any

from torchtitan_rl.actors.simulated import SimulatedGenerator
from torchtitan_rl.core.columns import Column, declare
from torchtitan_rl.core.types import Completion

SURPRISE = declare(Column("surprise", "float32", math.nan, covers="completion"))


class SurprisingGenerator(SimulatedGenerator):
    def _complete(self, *args: Any) -> Completion:
        made = super()._complete(*args)
        made.columns["surprise"] = [token / 4 for token in made.token_ids]
        return made
