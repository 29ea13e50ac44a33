"""VLLMGenerator: prompts in, Completions out, weights pulled between engine steps.

Awake, it has weights and a KV cache; asleep it has given their memory back.
"""

import asyncio
import itertools
from typing import TypeAlias

from monarch.actor import Actor, concurrent_endpoint

from torchtitan_rl.config import SamplingConfig
from torchtitan_rl.config.generator import GeneratorConfig
from torchtitan_rl.core.types import Completion, Prompt
from torchtitan_rl.engines.vllm.engine import Engine
from torchtitan_rl.weight_sync.handle import WeightHandle


class VLLMGenerator(Actor):
    """An in-process vLLM engine as an actor. Concurrent calls share one continuous batch.

    Example:
        generator = await spawn_generator(VLLMGenerator.Config(), model="models/tiny", seed=0)
        completions = await generator.actor.generate.call_one(
            ["47 85"], sampling_config=SamplingConfig(n=4, max_tokens=32)
        )
    """

    Config: TypeAlias = GeneratorConfig

    def __init__(self, config: GeneratorConfig, *, model: str, seed: int) -> None:
        self.config = config
        self._model, self._seed = model, seed
        self._calls = itertools.count()
        self._pulling = asyncio.Lock()

    @concurrent_endpoint
    async def setup(self) -> None:
        """Load the model. Apart from `__init__`, so that a failure comes back as an error."""
        from torchtitan_rl.weight_sync.rdma import Inbox  # which is no use before there are weights

        self.inbox = Inbox()
        self.engine = await asyncio.to_thread(
            Engine,
            self._model,
            self.config.engine,
            seed=self._seed,
            tensor_parallel=self.config.tensor_parallel_degree,
        )

    @concurrent_endpoint
    async def generate(
        self,
        prompts: list[Prompt],
        *,
        sampling_config: SamplingConfig | list[SamplingConfig] | None = None,
        group_ids: list[str] | None = None,
        sample_numbers: list[int] | None = None,
    ) -> list[Completion]:
        """`n` completions of each prompt, a string or token ids; ordered by prompt, then sample.

        `sampling_config` is for all prompts, or a list has one for each; without it the actor's own
        is used. A sample's seed derives from the run's seed, its group id and its number in the
        group, which counts from `sample_numbers`, or from 0. Name the groups to get the same
        samples again; without names every call makes new groups.
        """
        if group_ids is None:
            call = next(self._calls)
            group_ids = [f"call {call}/{index}" for index in range(len(prompts))]
        return await self.engine.generate(
            prompts,
            self.config.sampling if sampling_config is None else sampling_config,
            group_ids,
            sample_numbers,
        )

    @concurrent_endpoint
    async def cancel(self, group_ids: list[str]) -> None:
        """End the calls that these groups are part of: nobody waits for them any more."""
        await self.engine.cancel(group_ids)

    @concurrent_endpoint
    async def pull_weights(self, handle: WeightHandle) -> int:
        """Serve the published weights from the next engine step on; returns their version. If they
        cannot be read, the old ones go on being served."""
        async with self._pulling:
            await self.engine.pull_weights(await self.inbox.fetch(handle))
        return self.engine.policy_version

    @concurrent_endpoint
    async def sleep(self) -> int:
        """Give the memory of weights and KV cache back until `wake`; returns how many bytes that
        were. Calls that are under way, and those that come meanwhile, end with an error."""
        async with self._pulling:
            return await self.engine.sleep()

    @concurrent_endpoint
    async def wake(self, handle: WeightHandle) -> int:
        """Serve the published weights from now on; returns their version. If they cannot be read,
        the generator sleeps on."""
        async with self._pulling:
            await self.engine.wake(await self.inbox.fetch(handle))
        return self.engine.policy_version
