"""Reference: the frozen model of the reference KL, on processes of its own."""

from dataclasses import dataclass, field

import torch
from monarch.actor import Actor, endpoint

from torchtitan_rl.batching.grid import Grid
from torchtitan_rl.config.parallelism import Parallelism
from torchtitan_rl.core.configurable import Configurable
from torchtitan_rl.platform import Dtype


class Reference(Actor, Configurable):
    """One rank of the reference mesh. Its weights are those of the HF folder, and stay.

    Example:
        reference = await spawn_reference(Reference.Config(), model="models/tiny")
        columns = per_rank(await reference.actor.logprobs.call(grid))
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        parallelism: Parallelism = field(default_factory=Parallelism)
        dtype: Dtype = "auto"
        """`auto`: float32 on a CPU, bfloat16 on a GPU."""
        threads: int = 1
        """CPU threads per rank."""

        def __post_init__(self) -> None:
            if self.threads < 1:
                raise ValueError(f"reference.threads must be at least 1; got {self.threads}")

    def __init__(self, config: Config, *, model: str) -> None:
        self.config = config
        self._model_folder = model

    @endpoint
    async def setup(self) -> None:
        """Build the model and load its weights."""
        # Heavy, and only needed here: the controller imports this module for its Config.
        from torchtitan_rl.models.checkpoint import load_hf
        from torchtitan_rl.models.rank import ModelRank

        self.rank = ModelRank(
            self._model_folder, self.config.parallelism, dtype=self.config.dtype, seed=0
        )
        load_hf(self.rank.model, self.rank.adapter, self._model_folder)
        self.rank.model.requires_grad_(False)

    @endpoint
    async def logprobs(self, grid: Grid) -> list[torch.Tensor]:
        """For each cell of this rank's column: [tokens] logprobs of the tokens that train."""
        return [self.rank.logprobs(row[self.rank.dp_rank]) for row in grid.cells]
