"""Weights from the trainer to the generators, during the next step where that is allowed."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import torch

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.config.sampling import SamplingConfig
from torchtitan_rl.core.types import Episode
from torchtitan_rl.observability.console import console
from torchtitan_rl.platform import resolve_dtype
from torchtitan_rl.rollout.stream import RolloutStream
from torchtitan_rl.run.actor_set import ActorSet
from torchtitan_rl.run.turns import Turns
from torchtitan_rl.weight_sync.handle import (
    Transport,
    WeightHandle,
    WrongWeightsError,
    merge_handles,
)
from torchtitan_rl.weight_sync.transport import choose_transport

PROBE = SamplingConfig(n=1, max_tokens=16, logprobs=True)
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""How far logprobs of the same weights may be apart."""


class WeightSync:
    """Publishes snapshots and has the generators pull them.

    Generators that sleep pull them when they wake. With `max_offpolicy_steps`, the next training
    step begins while they do: the trainer's optimizer waits only for its own copy, the generators
    only between two steps of their engines.

    Example:
        sync = WeightSync(config, actors, call_trainer, turns, measure, probe=[7, 8])
        version = await sync.now()
        ...
        await sync.begin(trained=True, stream=None)
    """

    def __init__(
        self,
        config: RunConfig,
        actors: ActorSet,
        call_trainer: Callable[[str, Callable[[Any], Awaitable]], Awaitable[list[Any]]],
        turns: Turns,
        measure: Callable[[list[Episode]], Awaitable[dict[str, float]]],
        probe: list[int],
    ) -> None:
        self._config, self._actors = config, actors
        self._call_trainer, self._turns = call_trainer, turns
        self._measure, self._probe = measure, probe
        # A check wants the trainer's weights to be those that were published.
        self._waits = not config.max_offpolicy_steps or config.trainer.weight_sync.check
        self._transport: Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._handle: WeightHandle | None = None
        self.version = 0
        """Policy version of the weights that the generators serve."""
        self.metrics: dict[str, float] = {}
        """Metrics of the last sync that is done."""

    async def now(self) -> int:
        """Bring the weights to the generators, outside of any step; returns their version."""
        await self._publish_and_pull()
        self.metrics.clear()  # they are those of a step
        return self.version

    async def begin(self, *, trained: bool, stream: RolloutStream | None) -> None:
        """Bring the weights of one more step, if it has trained them, and tell the stream. Returns
        when the generators serve them or, if they may lag, at once."""
        await self.done()  # one at a time: a snapshot lives until the next but one
        self._task = asyncio.create_task(self._sync(trained, stream))
        if self._waits:
            await self.done()

    async def done(self) -> None:
        """Wait until the generators serve what was last begun."""
        if self._task is not None:
            await asyncio.shield(self._task)  # who stops waiting does not stop it

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _sync(self, trained: bool, stream: RolloutStream | None) -> None:
        try:
            if trained:
                await self._publish_and_pull()
            if stream and not self._config.colocated:  # else when the generators are awake
                stream.advance(stream.steps_done + 1)
        except Exception as error:
            if stream:  # else whoever waits for its groups would not know
                stream.fail(error)
            raise

    async def _publish_and_pull(self) -> None:
        if self._transport is None:
            self._transport, why = choose_transport(
                self._config.trainer.weight_sync, self._actors.ends
            )
            console.print(why, markup=False)
        dtype = resolve_dtype(self._config.generator.engine.dtype, self._actors.device)
        how = {"transport": self._transport, "dtype": getattr(torch, dtype)}
        ranks = await self._call_trainer(
            "publish weights", lambda trainer: trainer.publish_weights.call(**how)
        )
        handle = self._handle = merge_handles(ranks, last=self._handle)
        await self._actors.generators.pull(handle)
        self.version = handle.version
        if handle.nbytes:
            self.metrics["sync/changed_share"] = handle.changed_bytes / handle.nbytes
        if self._config.trainer.weight_sync.check:
            self.metrics.pop("sync/mismatch", None)
            self.metrics |= await self._mismatch(TOLERANCE[dtype])

    async def _mismatch(self, most: float) -> dict[str, float]:
        """How far the generators' logprobs are from the trainer's; too far is an error. Nothing, if
        all generators have just died: those that replace them are checked after the next sync."""
        await self._turns.generators()
        completions = await self._actors.generators.sample_on_each(self._probe, PROBE)
        if not completions:
            return {}
        episodes = [
            Episode(
                policy_version=0,  # not looked at: it is the newest
                prompt_token_ids=self._probe,
                token_ids=completion.token_ids,
                token_logprobs=completion.token_logprobs,
                reward=0.0,
                advantage=0.0,
                task="check_weights",
                group_id=f"check_weights/{number}",
                token_versions=[0] * len(completion.token_ids),
                routed_experts=completion.routed_experts,
            )
            for number, completion in enumerate(completions)
        ]
        worst = (await self._measure(episodes))["mismatch/all/max"]
        if worst > most:
            raise WrongWeightsError(
                f"trainer.weight_sync.check: after the sync of version {self.version} a "
                f"generator's logprobs are off by {worst:.3g} from the trainer's; up to {most:g} "
                "would be rounding"
            )
        return {"sync/mismatch": worst}
