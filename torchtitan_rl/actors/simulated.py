"""A generator and a trainer without a model: declared delays and failures, to study scheduling.

They stand where the real ones stand, as a choice in a recipe: with `generator.backend simulated`
tokens are random, with `trainer.backend simulated` nothing is learned. Prompts are rendered all the
same, so a model folder with a tokenizer is needed; and steps train only if the task rewards some
random tokens more than others.

torch is imported only where a batch is looked into: a simulated generator, like a grader, starts in
a fraction of the time without it.
"""

import asyncio
import itertools
import os
import random
from typing import TYPE_CHECKING, Any

from monarch.actor import Actor, concurrent_endpoint

from torchtitan_rl.config.checkpoint import AsyncMode
from torchtitan_rl.config.generator import GeneratorConfig
from torchtitan_rl.config.sampling import SamplingConfig
from torchtitan_rl.config.trainer import TrainerConfig
from torchtitan_rl.core.metrics import Metrics, by_task, fetch_numbers, merge_metrics
from torchtitan_rl.core.seeds import sample_seed
from torchtitan_rl.core.types import Completion
from torchtitan_rl.weight_sync.handle import WeightHandle

if TYPE_CHECKING:
    from torchtitan_rl.batching.grid import RankCells

VOCABULARY = range(250)
"""Tokens that any tokenizer has."""


class SimulatedGenerator(Actor):
    """Samples random tokens, always the same for a seed, in the time that it is configured for."""

    def __init__(
        self,
        config: GeneratorConfig,
        *,
        model: str,
        seed: int,
        seconds_per_token: float = 0.0,
        seconds_per_pull: float = 0.0,
        failure_rate: float = 0.0,
        death_rate: float = 0.0,
    ) -> None:
        """`seconds_per_token` is the time of one completion, of which up to engine.max_num_seqs are
        decoded side by side; `seconds_per_pull` is the time to swap in new weights. The rates are
        shares of calls: those that fail, and those in which the process dies."""
        self.config, self._seed = config, seed
        self._seconds_per_token, self._seconds_per_pull = seconds_per_token, seconds_per_pull
        self._failure_rate, self._death_rate = failure_rate, death_rate
        self._fate = random.Random(f"{seed}/{os.getpid()}")
        self._calls = itertools.count()

    @concurrent_endpoint
    async def setup(self) -> None:
        self._version, self._asleep = 0, False
        self._seats = asyncio.Semaphore(self.config.engine.max_num_seqs)

    @concurrent_endpoint
    async def generate(
        self,
        prompts: list[list[int]],
        *,
        sampling_config: SamplingConfig | list[SamplingConfig] | None = None,
        group_ids: list[str] | None = None,
        sample_numbers: list[int] | None = None,
    ) -> list[Completion]:
        sampling = self.config.sampling if sampling_config is None else sampling_config
        samplings = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        names = group_ids or [f"call {next(self._calls)}/{i}" for i in range(len(prompts))]
        firsts = sample_numbers or [0] * len(prompts)
        if self._asleep:
            raise RuntimeError("the generator is asleep: `wake` it first")
        if self._fate.random() < self._death_rate:
            os._exit(1)
        if self._fate.random() < self._failure_rate:
            raise RuntimeError("a simulated failure")
        completions = [
            self._complete(index, prompt, sampling, name, sample)
            for index, (prompt, sampling, name, first) in enumerate(
                zip(prompts, samplings, names, firsts, strict=True)
            )
            for sample in range(first, first + sampling.n)
        ]
        if self._seconds_per_token:
            await asyncio.gather(*map(self._decode, completions))
        return completions

    def _complete(
        self, index: int, prompt: list[int], sampling: SamplingConfig, name: str, sample: int
    ) -> Completion:
        rng = random.Random(sample_seed(self._seed, name, sample))
        ids = rng.choices(VOCABULARY, k=rng.randint(1, sampling.max_tokens))
        logprobs = [-1.0] * len(ids) if sampling.logprobs else None
        text = " ".join(map(str, ids))
        return Completion(self._version, index, prompt, text, ids, token_logprobs=logprobs)

    async def _decode(self, completion: Completion) -> None:
        async with self._seats:
            completion.policy_version = self._version
            await asyncio.sleep(len(completion.token_ids) * self._seconds_per_token)

    @concurrent_endpoint
    async def cancel(self, group_ids: list[str]) -> None:
        """Nothing to save: waiting costs nothing."""

    @concurrent_endpoint
    async def pull_weights(self, handle: WeightHandle) -> int:
        await asyncio.sleep(self._seconds_per_pull)
        self._version = handle.version
        return self._version

    @concurrent_endpoint
    async def sleep(self) -> int:
        """There is nothing to give back."""
        self._asleep = True
        return 0

    @concurrent_endpoint
    async def wake(self, handle: WeightHandle) -> int:
        await asyncio.sleep(self._seconds_per_pull)
        self._version, self._asleep = handle.version, False
        return self._version


class SimulatedTrainer(Actor):
    """Takes the time that it is configured for, and counts versions."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        model: str,
        steps: int,
        checkpoint_folder: str,
        tokens_folder: str,
        weights_folder: str,
        keep: int,
        async_mode: AsyncMode = "disabled",
        seed: int,
        seconds_per_step: float = 0.0,
        seconds_per_publish: float = 0.0,
    ) -> None:
        """`seconds_per_step` is the time to train on a batch, `seconds_per_publish` the time to
        snapshot the weights."""
        self.config = config
        self._seconds_per_step, self._seconds_per_publish = seconds_per_step, seconds_per_publish

    @concurrent_endpoint
    async def setup(self, *, resume: bool) -> None:
        self._version = 0

    @concurrent_endpoint
    async def steps_done(self) -> int:
        return 0

    @concurrent_endpoint
    async def train_step(self, *grids: "RankCells", step: int = 0) -> Metrics:
        measured = merge_metrics([_ages(grid, self._version) for grid in grids])
        await asyncio.sleep(self._seconds_per_step)
        self._version += 1
        return measured

    @concurrent_endpoint
    async def measure(self, grid: "RankCells") -> Metrics:
        return _ages(grid, self._version)

    @concurrent_endpoint
    async def publish_weights(self, **_how: Any) -> WeightHandle:
        version = self._version  # the next step may begin before the snapshot is there
        await asyncio.sleep(self._seconds_per_publish)
        return WeightHandle(version, "shm")

    @concurrent_endpoint
    async def sleep(self) -> int:
        """There is nothing to give back."""
        return 0

    @concurrent_endpoint
    async def wake(self) -> None:
        """There is nothing to bring back."""

    @concurrent_endpoint
    async def save(self, step: int, *, wait: bool = True) -> None:
        """There is nothing to save."""

    @concurrent_endpoint
    async def export_hf(self, folder: str) -> None:
        """There is nothing to export."""


def _ages(grid: "RankCells", version: int) -> Metrics:
    from torchtitan_rl.batching.documents import segment_ids, segments

    measured = []
    for cell in grid.cells:
        if "token_versions" not in cell.streams:  # demonstrations, which nobody sampled
            continue
        trains = cell.streams["loss_mask"]
        ages = version - cell.streams["token_versions"][trains]
        sequences = segment_ids(segments(cell.documents))[trains]
        measured.append(by_task({"policy_age": ages}, cell.tasks, sequences))
    return merge_metrics(fetch_numbers(measured))
