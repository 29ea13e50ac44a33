"""Several generators as one: work goes to the least loaded, and a dead one is replaced.

The run never ends because a generator did: what it had not finished runs again elsewhere, and its
successor gets the current weights before it gets work.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from torchtitan_rl.config.sampling import SamplingConfig
from torchtitan_rl.core.errors import describe_error
from torchtitan_rl.core.types import Completion
from torchtitan_rl.core.waiting import together
from torchtitan_rl.observability.timeline import Timeline
from torchtitan_rl.supervision.replicas import (
    GeneratorDiedError,
    GeneratorsDiedError,
    Replica,
    Replicas,
)
from torchtitan_rl.supervision.spawn import Spawned
from torchtitan_rl.weight_sync.handle import WeightHandle

__all__ = ["DeadlyPromptError", "Generators", "GeneratorsDiedError"]

MOST_DEATHS_OF_AN_ASK = 3
"""Generators that may die over one prompt. Before the last it runs apart from others of its kind,
so that a prompt that kills does not take those along that only were beside it."""


class DeadlyPromptError(RuntimeError):
    """Generator after generator died over a prompt."""


@dataclass(slots=True)
class Ask:
    """One prompt of a call: `n` samples that stay together."""

    index: int
    prompt: list[int]
    sampling: SamplingConfig
    name: str
    group: str
    deaths: int = 0
    """Generators that died over it."""
    alone: bool = False
    """Whether it is sampled in a call of its own: one that it shared has failed."""
    completions: list[Completion] = field(default_factory=list)
    error: Exception | None = None

    @property
    def is_open(self) -> bool:
        return not self.completions and self.error is None

    def result(self, version: int) -> list[Completion]:
        """What was sampled, or as many completions without tokens, which say why."""
        if self.error is None:
            return self.completions
        why, logprobs = describe_error(self.error), self.sampling.logprobs
        return [
            Completion(version, self.index, self.prompt, why, [], [] if logprobs else None, "abort")
            for _ in range(self.sampling.n)
        ]


@dataclass(slots=True)
class Hand:
    """What one generator is asked in one call."""

    replica: Replica
    asks: list[Ask] = field(default_factory=list)
    load: int = 0

    def add(self, ask: Ask) -> None:
        self.asks.append(ask)
        self.load += ask.sampling.n
        self.replica.load += ask.sampling.n

    def release(self) -> None:
        """The generator is done with it. Can be called twice."""
        self.replica.load -= self.load
        self.load = 0


class Generators(Replicas):
    """All replicas behind the calls of one.

    Example:
        generators = Generators(lambda number: spawn_generator(config, model=model, seed=0), 2)
        await generators.start()
        completions = await generators.sample([[7, 8]], [SamplingConfig(n=4)], ["sums/train/0"])
    """

    def __init__(
        self,
        spawn: Callable[[int], Awaitable[Spawned]],
        count: int,
        *,
        deadline_seconds: float = 1800.0,
        most_deaths_in_a_row: int = 5,
        timeline: Timeline | None = None,
    ) -> None:
        super().__init__(
            spawn,
            count,
            deadline_seconds=deadline_seconds,
            most_deaths_in_a_row=most_deaths_in_a_row,
            timeline=timeline or Timeline(),
        )
        self._homes: dict[str, Replica] = {}
        self._last_chance = asyncio.Lock()

    # ---- sampling -----------------------------------------------------------------------------

    async def sample(
        self,
        prompts: list[list[int]],
        samplings: list[SamplingConfig],
        names: list[str],
        groups: Sequence[str] | None = None,
    ) -> list[Completion]:
        """`n` completions of each prompt, ordered by prompt. Prompts of one of `groups` go to the
        generator that has had it since the last weights; else a prompt goes to the least loaded.

        A prompt that fails, also by itself, has `n` completions without tokens, that finish with
        `abort` and whose text says why. If all prompts fail, the first one's error is raised.
        """
        asks = [
            Ask(i, prompt, sampling, name, group)
            for i, (prompt, sampling, name, group) in enumerate(
                zip(prompts, samplings, names, groups or names, strict=True)
            )
        ]
        while left := [ask for ask in asks if ask.is_open]:
            if usual := [ask for ask in left if ask.deaths < MOST_DEATHS_OF_AN_ASK - 1]:
                await self._try(usual)
            else:
                async with self._last_chance:
                    await self._try(left[:1])
        errors = [ask.error for ask in asks if ask.error is not None]
        if errors and len(errors) == len(asks):
            raise errors[0]
        version = self._handle.version if self._handle else 0
        return [completion for ask in asks for completion in ask.result(version)]

    async def _try(self, asks: list[Ask]) -> None:
        hands = await self._deal(asks)
        try:
            await together(*(self._sample_on(hand) for hand in hands))
        finally:
            for hand in hands:  # also of those that were cancelled before they began
                hand.release()

    async def _deal(self, asks: list[Ask]) -> list[Hand]:
        """Who samples what. Waits for a successor if nobody is alive."""
        await self._some_alive()
        hands: dict[tuple[int, int | None], Hand] = {}
        for ask in asks:
            replica = self._home(ask.group)
            key = (replica.number, ask.index if ask.alone else None)
            hands.setdefault(key, Hand(replica)).add(ask)
        return list(hands.values())

    def _home(self, group: str) -> Replica:
        replica = self._homes.get(group)
        if replica is None or replica.spawned is None:
            replica = min(self._alive, key=lambda r: (r.load, r.number))
            self._homes[group] = replica
        return replica

    async def _sample_on(self, hand: Hand) -> None:
        """Give its asks what they asked for, or an error; or leave them open, to be dealt again."""
        asks, spawned = hand.asks, hand.replica.spawned
        try:
            if spawned is None:  # died since it was chosen
                return
            completions: list[Completion] = await self._call(
                hand.replica,
                "generate",
                lambda actor: actor.generate.call_one(
                    [ask.prompt for ask in asks],
                    sampling_config=[ask.sampling for ask in asks],
                    group_ids=[ask.name for ask in asks],
                ),
            )
            self.deaths.in_a_row = 0
            for completion in completions:
                ask = asks[completion.prompt_idx]
                completion.prompt_idx = ask.index
                ask.completions.append(completion)
        except asyncio.CancelledError:
            if spawned is hand.replica.spawned:
                self._abandon(hand)
            raise
        except GeneratorDiedError as error:
            for ask in asks:
                ask.deaths += 1
                if ask.deaths == MOST_DEATHS_OF_AN_ASK:
                    ask.error = DeadlyPromptError(
                        f"{ask.deaths} generators died over group {ask.group!r}, the last of them "
                        f"{error}"
                    )
                    ask.error.__cause__ = error
        except Exception as error:
            # One of the prompts may be to blame: each once more, by itself.
            for ask in asks:
                ask.error = error if len(asks) == 1 else None
                ask.alone = True
        finally:
            hand.release()

    def _abandon(self, hand: Hand) -> None:
        """Have a generator drop what nobody waits for any more; until it has, it is no less busy.
        One that does not even answer this hangs, and is replaced."""
        names, kept = [ask.name for ask in hand.asks], Hand(hand.replica)
        for ask in hand.asks:
            kept.add(ask)

        async def cancel() -> None:
            with contextlib.suppress(Exception):  # nobody waits for this either
                call = "cancel", lambda actor: actor.cancel.call_one(names)
                await self._call(kept.replica, *call)

        self._in_background(cancel()).add_done_callback(lambda _: kept.release())

    # ---- weights ------------------------------------------------------------------------------

    async def pull(self, handle: WeightHandle) -> None:
        """Have all generators serve these weights; one that is being replaced will get them."""
        self._handle = handle
        self._homes.clear()  # cached prefixes go with the weights they were computed with
        await together(*(self._pull(replica, handle) for replica in self._alive))

    async def sample_on_each(self, prompt: list[int], sampling: SamplingConfig) -> list[Completion]:
        """What each generator makes of a prompt; of one that dies over it, nothing."""

        async def sample(replica: Replica) -> list[Completion]:
            with contextlib.suppress(GeneratorDiedError):
                return await self._call(
                    replica,
                    "answer a probe",
                    lambda actor: actor.generate.call_one([prompt], sampling_config=sampling),
                )
            return []

        made = await together(*(sample(replica) for replica in self._alive))
        return [completion for completions in made for completion in completions]

    async def _pull(self, replica: Replica, handle: WeightHandle) -> None:
        with contextlib.suppress(GeneratorDiedError):  # its successor pulls them before it joins
            await self._call(
                replica, "pull weights", lambda actor: actor.pull_weights.call_one(handle)
            )
