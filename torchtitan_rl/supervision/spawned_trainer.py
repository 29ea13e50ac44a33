"""A trainer for scripts and notebooks: episodes in, numbers out."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_rl.algorithms.objective import episode_needs
from torchtitan_rl.batching.grid import Grid, grid_metrics, split_groups, weighed_grid
from torchtitan_rl.batching.validation import require, validate
from torchtitan_rl.config import TrainerConfig
from torchtitan_rl.core.metrics import flatten, merge_metrics
from torchtitan_rl.core.types import Episode
from torchtitan_rl.models.hf import experts_of, read_hf_config
from torchtitan_rl.supervision.processes import Spawned, per_rank
from torchtitan_rl.supervision.ranks import call_ranks
from torchtitan_rl.weight_sync.handle import Transport, WeightHandle, merge_handles


@dataclass(slots=True, kw_only=True)
class SpawnedTrainer(Spawned):
    """A trainer's ranks, with the calls that scripts and notebooks make. A run calls the endpoints
    of `actor` itself, with deadlines.

    Example:
        metrics = await trainer.train(episodes)
        await generator.actor.pull_weights.call_one(await trainer.publish())
    """

    config: TrainerConfig
    model: str
    """The HF folder that its weights come from."""

    async def train(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Take a step on these episodes, as a run does: `updates_per_step` optimizer steps with the
        configured loss. Returns its metrics."""
        self._check(episodes)
        grids = [self._grid(part) for part in split_groups(episodes, self.config.updates_per_step)]
        replies = await call_ranks(self.actor, "train_step", *grids)
        return {**flatten(merge_metrics(replies)), **grid_metrics(grids)}

    async def logprobs(self, episodes: Sequence[Episode]) -> list[list[float]]:
        """The logprob of each token of each completion under the weights of now; NaN where a token
        does not train."""
        self._check(episodes)
        grid = self._grid(episodes)
        columns = [
            [per_rank(await self.actor.logprobs.call(row[rank]))[0] for row in grid.cells]
            for rank in range(self.config.parallelism.dp_degree)
        ]
        return [values.tolist() for values in grid.read_back(columns)]

    async def publish(self, transport: Transport = "shm") -> WeightHandle:
        """Take a snapshot of the weights, for `pull_weights` of a generator; it stays readable
        until the next but one."""
        return merge_handles(per_rank(await self.actor.publish_weights.call(transport=transport)))

    def _check(self, episodes: Sequence[Episode]) -> None:
        hf_config = read_hf_config(self.model)
        validate(episodes, vocab_size=hf_config["vocab_size"], experts=experts_of(hf_config))
        require(episodes, episode_needs(self.config))

    def _grid(self, episodes: Sequence[Episode]) -> Grid:
        return weighed_grid(
            episodes,
            config=self.config,
            hidden_size=read_hf_config(self.model)["hidden_size"],
            # A run knows how long a completion may be; here the longest has to do.
            fixed_length=max(len(episode.token_ids) for episode in episodes),
        )
