"""Several generators as one: requests go to the least loaded, and a dead one is replaced.

The run never ends because a generator did: what it had not finished runs again elsewhere, and its
successor gets the current weights before it gets work.

All of them are awake, or all asleep: then the memory that they use is another actor's, so requests
are refused, and the successor of one that has died is started when the others wake.
"""

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torchtitan_rl.actors.interfaces import Sample, SampleFailure, SampleRequest
from torchtitan_rl.config.sampling import SamplingConfig
from torchtitan_rl.core.errors import TorchtitanRLError, describe_error
from torchtitan_rl.core.types import Completion
from torchtitan_rl.core.waiting import together
from torchtitan_rl.hosts.link import HostLostError
from torchtitan_rl.observability.timeline import Timeline
from torchtitan_rl.supervision.dispatch import RETRY_ELSEWHERE, Dispatcher, Router, Work
from torchtitan_rl.supervision.pool import (
    ActorPool,
    CallJoining,
    Ready,
    Replica,
    ReplicaDiedError,
    Spawn,
    is_death,
)
from torchtitan_rl.weight_sync.handle import WeightHandle

Bring = Callable[[WeightHandle | None, Sequence[int]], Awaitable[dict[int, WeightHandle | None]]]
"""Brings weights to the hosts of the generators with these numbers; returns the handle as each can
open it, and nothing for one whose host is lost."""


async def _as_it_is(
    handle: WeightHandle | None, numbers: Sequence[int]
) -> dict[int, WeightHandle | None]:
    return dict.fromkeys(numbers, handle)


@dataclass(frozen=True, slots=True)
class SamePrompt:
    """Requests of one call for samples of one prompt of one group: they are made, and fail,
    together."""

    requests: list[SampleRequest] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    """Places of the requests in their call."""


class DeadlyPromptError(TorchtitanRLError, RuntimeError):
    """Generator after generator died over a prompt."""


class GeneratorsAsleepError(TorchtitanRLError, RuntimeError):
    """A sample was asked of generators that sleep."""


class Generators:
    """All replicas of the generator, called like one.

    Example:
        generators = Generators(lambda number: spawn_generator(config, model=model, seed=0), 2)
        await generators.start()
        request = SampleRequest([7, 8], SamplingConfig(), "sums/train/0", "sums/train/0")
        [completion] = await generators.sample([request])
    """

    def __init__(
        self,
        spawn: Spawn,
        count: int,
        *,
        deadline_seconds: float = 1800.0,
        most_deaths_in_a_row: int = 5,
        ready: Ready | None = None,
        host_seconds: float = 600.0,
        bring: Bring | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.pool = ActorPool(
            "generator",
            spawn,
            count,
            deadline_seconds=deadline_seconds,
            most_deaths_in_a_row=most_deaths_in_a_row,
            numbered=True,
            on_join=self._bring_weights,
            ready=ready,
            host_seconds=host_seconds,
            timeline=timeline,
        )
        # Sticky, because a replica has cached the prefixes of the groups it has had.
        self.router = Router(sticky=True)
        self._dispatcher = Dispatcher(
            self.pool,
            RETRY_ELSEWHERE,
            what="generate",
            call=_generate,
            deadly_error=_deadly_error,
            abandon=_cancel,
            router=self.router,
        )
        self._bring = bring or _as_it_is
        self._handle: WeightHandle | None = None
        self.state: Literal["awake", "asleep"] = "awake"
        """Asleep, they have given the memory of weights and KV cache back."""

    async def start(self) -> None:
        """Spawn all generators."""
        await self.pool.start()

    async def stop(self) -> None:
        """End every process of the generators."""
        await self.pool.stop()

    # ---- sampling -----------------------------------------------------------------------------

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """What becomes of each request, in order; if all requests fail, the first error is raised.

        Requests of a group go to the generator that has had it since the last weights; a new group
        goes to the least loaded. A request fails if its prompt does so also by itself, or if
        generator after generator dies over it.
        """
        self._check_awake()
        prompts: dict[tuple[str, tuple[int, ...]], SamePrompt] = {}
        for index, request in enumerate(requests):
            key = request.group_id, tuple(request.prompt_token_ids)
            same = prompts.setdefault(key, SamePrompt())
            same.requests.append(request)
            same.indices.append(index)
        works = [
            Work[SamePrompt, list[Completion]](same, key=group_id, load=len(same.requests))
            for (group_id, _), same in prompts.items()
        ]
        await self._dispatcher.run(works)
        errors = [work.error for work in works if work.error is not None]
        if errors and len(errors) == len(works):
            raise errors[0]
        samples = {
            index: sample
            for work in works
            for index, sample in zip(work.payload.indices, _samples(work), strict=True)
        }
        return [samples[index] for index in range(len(requests))]

    async def sample_on_each(self, prompt: list[int], sampling: SamplingConfig) -> list[Completion]:
        """What each generator makes of a prompt; nothing of one that dies over it."""
        self._check_awake()

        def sample(actor: Any) -> Awaitable[list[Completion]]:
            return actor.generate.call_one(
                [prompt], sampling_config=[sampling], group_ids=["probe"], sample_numbers=[0]
            )

        made = await self._on_each("sample a probe", sample)
        return [completion for completions in made for completion in completions]

    # ---- weights ------------------------------------------------------------------------------

    async def pull(self, handle: WeightHandle) -> None:
        """Have all generators serve these weights; one that is being replaced will get them, and so
        will those that sleep, when they wake."""
        self._handle = handle
        self.router.forget()  # cached prefixes go with the weights they were computed with
        if self.state == "awake":
            await self._on_each_with_weights("pull weights", _pull_weights)

    # ---- sleeping -----------------------------------------------------------------------------

    async def sleep(self) -> int:
        """Have all generators give back the memory of weights and KV cache; returns how many bytes
        those were. Nothing should be under way: it would end with an error."""
        self.state = "asleep"
        # A successor that is being started has memory already: it goes to sleep with the others.
        await self.pool.hold_starts()
        given_back = await self._on_each("sleep", _sleep)
        await self.pool.hold_starts()  # one that dies over it, or hangs, has memory until it ends
        return sum(given_back)

    async def wake(self) -> None:
        """Have all generators serve the newest weights again; dead ones are replaced now."""
        self.router.forget()
        await self._on_each_with_weights("wake", _wake)
        self.state = "awake"
        self.pool.allow_starts()

    def _check_awake(self) -> None:
        if self.state == "asleep":
            raise GeneratorsAsleepError(
                "the generators are asleep, as the trainer has their memory: wake them first"
            )

    async def _on_each(self, what: str, call: Callable[[Any], Awaitable[Any]]) -> list[Any]:
        """What each generator returns from a call; nothing of one that dies over it, whose
        successor pulls the newest weights before it joins."""

        async def on_one(replica: Replica) -> list[Any]:
            with contextlib.suppress(ReplicaDiedError):
                return [await self.pool.call(replica, what, call)]
            return []

        returned = await together(*(on_one(replica) for replica in self.pool.alive))
        return [one for ones in returned for one in ones]

    async def _on_each_with_weights(
        self, what: str, call: Callable[[WeightHandle | None, Any], Awaitable[Any]]
    ) -> None:
        """Make a call of each generator that takes the newest weights."""
        alive = self.pool.alive
        handles = await self._bring(self._handle, [replica.number for replica in alive])

        async def on_one(replica: Replica) -> None:
            if replica.number in handles:  # else its host is lost
                with contextlib.suppress(ReplicaDiedError):
                    await self.pool.call(replica, what, partial(call, handles[replica.number]))

        await together(*map(on_one, alive))

    async def _bring_weights(self, number: int, call: CallJoining) -> None:
        """Have a generator that is to join serve the current weights."""
        served = None
        while served is not (handle := self._handle):  # weights may be published while it pulls
            try:
                here = await self._bring(handle, [number])
                if number not in here:
                    raise HostLostError("the host of a generator was lost as weights came to it")
                await call("pull weights", partial(_pull_weights, here[number]))
                served = handle
            except Exception as error:
                # They may have been overwritten by newer ones just before it read them.
                if is_death(error) or handle is self._handle:
                    raise


def _pull_weights(handle: WeightHandle | None, actor: Any) -> Awaitable[int]:
    return actor.pull_weights.call_one(handle)


def _sleep(actor: Any) -> Awaitable[int]:
    return actor.sleep.call_one()


def _wake(handle: WeightHandle | None, actor: Any) -> Awaitable[int]:
    return actor.wake.call_one(handle)


async def _generate(actor: Any, prompts: list[SamePrompt]) -> list[list[Completion]]:
    """The completions of each prompt's requests, in order."""
    requests = [request for prompt in prompts for request in prompt.requests]
    completions = await actor.generate.call_one(
        [request.prompt_token_ids for request in requests],
        sampling_config=[request.sampling for request in requests],
        group_ids=[request.seed_name for request in requests],
        sample_numbers=[request.seed_number for request in requests],
    )
    if len(completions) != len(requests):
        raise ValueError(
            f"the generator returned {len(completions)} completions for {len(requests)} prompts "
            "with one sample each"
        )
    for made in completions:
        if not isinstance(made, Completion):
            raise TypeError(f"the generator returned {made!r}; expected a Completion")
    made = iter(completions)
    return [[next(made) for _ in prompt.requests] for prompt in prompts]


def _cancel(actor: Any, prompts: list[SamePrompt]) -> Awaitable[None]:
    names = {request.seed_name for prompt in prompts for request in prompt.requests}
    return actor.cancel.call_one(sorted(names))


def _deadly_error(work: Work[SamePrompt, list[Completion]], error: ReplicaDiedError) -> Exception:
    return DeadlyPromptError(
        f"{work.deaths} generators died over group {work.key!r}, the last of them {error}"
    )


def _samples(work: Work[SamePrompt, list[Completion]]) -> list[Sample]:
    if work.error is not None:
        return [SampleFailure("failed", describe_error(work.error))] * len(work.payload.indices)
    return [_sample(completion) for completion in work.outcome]


def _sample(completion: Completion) -> Sample:
    if not completion.token_ids or completion.finish_reason == "abort":
        return SampleFailure("empty", f"nothing was sampled ({completion.finish_reason})")
    return completion
