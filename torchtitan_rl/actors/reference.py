"""Reference: the frozen model of the reference KL, on processes of its own."""

from typing import TypeAlias

import torch
from monarch.actor import Actor, endpoint

from torchtitan_rl.batching.grid import RankCells
from torchtitan_rl.config.reference import ReferenceConfig


class Reference(Actor):
    """One rank of the reference mesh. Its weights are those of the HF folder, and never change.

    Example:
        reference = await spawn_reference(Reference.Config(), model="models/tiny")
        columns = await call_ranks(reference.actor, "logprobs", grid)
    """

    Config: TypeAlias = ReferenceConfig

    def __init__(self, config: ReferenceConfig, *, model: str) -> None:
        self.config = config
        self._model_folder = model

    @endpoint
    async def setup(self) -> None:
        """Build the model and load its weights."""
        # Heavy, and only needed here: the controller imports this module for the class.
        from torchtitan_rl.models.checkpoint import load_hf
        from torchtitan_rl.models.rank import ModelRank

        self.rank = ModelRank(
            self._model_folder, self.config.parallelism, dtype=self.config.dtype, seed=0
        )
        load_hf(self.rank.model, self.rank.adapter, self._model_folder)
        self.rank.model.requires_grad_(False)

    @endpoint
    async def logprobs(self, grid: RankCells) -> list[torch.Tensor]:
        """For each cell of this rank: [tokens] logprobs of the tokens that train."""
        self.rank.check_own(grid)
        return [self.rank.logprobs(cell) for cell in grid.cells]
