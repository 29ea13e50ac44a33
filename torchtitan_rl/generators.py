"""Several generators as one: work goes to the least loaded, and a dead one is replaced.

The run never ends because a generator did: what it had not finished runs again elsewhere, and its
successor gets the current weights before it gets work.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from torchtitan_rl.actors.engine import EngineDiedError
from torchtitan_rl.actors.spawn import Spawned
from torchtitan_rl.observability.console import console
from torchtitan_rl.observability.timeline import Timeline
from torchtitan_rl.sampling import SamplingConfig
from torchtitan_rl.types import Completion
from torchtitan_rl.waiting import Answer, Interrupted, WorkerDiedError, answer, together, unless
from torchtitan_rl.weight_sync.handle import WeightHandle

REMEMBERED_GROUPS = 10_000
"""Groups whose generator is remembered: their later turns find their prefix cached there."""

START_ATTEMPTS = 3
"""How often a successor is started."""

WATCH_SECONDS = 0.5
"""How often the generators' processes are looked at. Monarch may take half a minute to say that one
it has just sent a message to is gone, and of one that nobody calls it says nothing."""


class GeneratorsDiedError(RuntimeError):
    """Generators die faster than they can be replaced."""


@dataclass(slots=True)
class Replica:
    """One generator, on a mesh of its own."""

    number: int
    spawned: Spawned | None = None
    """None while it is being replaced."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the one that is spawned has died."""
    load: int = 0
    """Samples it is asked for."""


@dataclass(slots=True)
class Ask:
    """One prompt of a call: `n` samples that stay together."""

    index: int
    prompt: list[int]
    sampling: SamplingConfig
    name: str
    group: str


@dataclass(slots=True)
class Deaths:
    """How many generators have died, for the metrics and for knowing when to give up."""

    total: int = 0
    in_a_row: int = 0
    """Since anything was sampled."""
    since_step: int = 0
    """Not reported yet."""


class Generators:
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
        self._spawn = spawn
        self.replicas = [Replica(number) for number in range(count)]
        self._deadline = deadline_seconds
        self._timeline = timeline or Timeline()
        self._most_deaths = most_deaths_in_a_row
        self._homes: OrderedDict[str, Replica] = OrderedDict()
        self._handle: WeightHandle | None = None
        self._changed = asyncio.Condition()
        self._replacing: set[asyncio.Task] = set()
        self._watching: asyncio.Task | None = None
        self._failure: BaseException | None = None
        self.deaths = Deaths()

    async def start(self) -> None:
        """Spawn all of them, side by side."""
        await together(*(self._start(replica) for replica in self.replicas))
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """End every process, also of those that are just starting."""
        tasks = [*self._replacing, *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        alive = [r.spawned for r in self.replicas if r.spawned is not None]
        await asyncio.gather(*(s.stop() for s in alive), return_exceptions=True)

    # ---- sampling -----------------------------------------------------------------------------

    async def sample(
        self,
        prompts: list[list[int]],
        samplings: list[SamplingConfig],
        names: list[str],
        groups: Sequence[str] | None = None,
    ) -> list[Completion]:
        """`n` completions of each prompt, ordered by prompt. Prompts of one of `groups` go to the
        generator that has had it before; else a prompt goes to the least loaded."""
        asks = [
            Ask(i, prompt, sampling, name, group)
            for i, (prompt, sampling, name, group) in enumerate(
                zip(prompts, samplings, names, groups or names, strict=True)
            )
        ]
        made: list[list[Completion]] = [[] for _ in asks]
        while asks:
            dealt = await self._deal(asks)
            results = await together(*(self._sample_on(r, part) for r, part in dealt))
            asks = []
            for (_, part), completions in zip(dealt, results, strict=True):
                if completions is None:  # its generator died: once more, elsewhere
                    asks += part
                    continue
                for completion in completions:
                    ask = part[completion.prompt_idx]
                    completion.prompt_idx = ask.index
                    made[ask.index].append(completion)
        return [completion for of_prompt in made for completion in of_prompt]

    async def _deal(self, asks: list[Ask]) -> list[tuple[Replica, list[Ask]]]:
        """Who samples what. Waits for a successor if nobody is alive."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure or self._alive)
            if not self._alive:
                raise GeneratorsDiedError(
                    f"no generator is left ({self.deaths.in_a_row} died one after the other): "
                    f"{self._failure}. Look into the run's logs folder"
                ) from self._failure
            hands: dict[int, list[Ask]] = {}
            for ask in asks:
                replica = self._home(ask.group)
                replica.load += ask.sampling.n
                hands.setdefault(replica.number, []).append(ask)
        return [(self.replicas[number], part) for number, part in hands.items()]

    @property
    def _alive(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.spawned is not None]

    def _home(self, group: str) -> Replica:
        replica = self._homes.get(group)
        if replica is None or replica.spawned is None:
            replica = min(self._alive, key=lambda r: (r.load, r.number))
            self._homes[group] = replica
            if len(self._homes) > REMEMBERED_GROUPS:
                self._homes.popitem(last=False)
        return replica

    async def _sample_on(self, replica: Replica, asks: list[Ask]) -> list[Completion] | None:
        """The completions, or None if the generator died over them."""
        spawned, gone = replica.spawned, replica.gone
        try:
            if spawned is None:  # died since it was chosen
                return None
            call = spawned.actor.generate.call_one(
                [ask.prompt for ask in asks],
                sampling_config=[ask.sampling for ask in asks],
                group_ids=[ask.name for ask in asks],
            )
            completions: list[Completion] = await self._answer(replica, "generate", call, gone)
            self.deaths.in_a_row = 0
            return completions
        except asyncio.CancelledError:
            if spawned is not None:  # not waited for: a message that gets lost costs only time
                spawned.actor.cancel.broadcast([ask.name for ask in asks])
            raise
        except (WorkerDiedError, ActorError) as error:
            if not _died(error):
                raise
            assert spawned is not None
            await self._bury(replica, spawned, error)
            return None
        finally:
            replica.load -= sum(ask.sampling.n for ask in asks)

    # ---- weights ------------------------------------------------------------------------------

    async def pull(self, handle: WeightHandle) -> None:
        """Have all generators serve these weights; one that is being replaced will get them."""
        self._handle = handle
        await together(*(self._pull(replica, handle) for replica in self._alive))

    async def _pull(self, replica: Replica, handle: WeightHandle) -> None:
        spawned, gone = replica.spawned, replica.gone
        if spawned is None:
            return
        try:
            pulling = spawned.actor.pull_weights.call_one(handle)
            await self._answer(replica, "pull weights", pulling, gone)
        except (WorkerDiedError, ActorError) as error:
            if not _died(error):
                raise
            await self._bury(replica, spawned, error)

    # ---- life and death -----------------------------------------------------------------------

    async def _start(self, replica: Replica) -> None:
        """Spawn a generator; it joins when it serves the current weights."""
        spawned = await self._answer(replica, "start", self._spawn(replica.number))
        try:
            served = None
            while self._handle is not served:  # weights may be published while it pulls
                served = self._handle
                if served is not None:
                    call = spawned.actor.pull_weights.call_one(served)
                    await self._answer(replica, "pull weights", call)
        except BaseException:
            await spawned.stop()
            raise
        async with self._changed:
            replica.spawned, replica.gone = spawned, asyncio.Event()
            self._changed.notify_all()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for replica in self._alive:
                if (spawned := replica.spawned) and not spawned.alive:
                    await self._bury(replica, spawned, WorkerDiedError("its process has ended"))

    async def _bury(self, replica: Replica, spawned: Spawned, error: BaseException) -> None:
        """Note a death, once, and start the successor."""
        if replica.spawned is not spawned:
            return  # another call has noticed
        replica.spawned = None
        replica.gone.set()
        self.deaths.total += 1
        self.deaths.in_a_row += 1
        self.deaths.since_step += 1
        console.print(f"generator {replica.number} died; replacing it", markup=False)
        if self.deaths.in_a_row > self._most_deaths:
            await self._give_up(error)
            return
        task = asyncio.create_task(self._replace(replica, spawned))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self, replica: Replica, dead: Spawned) -> None:
        await dead.stop()  # whatever is left of it
        for attempt in range(START_ATTEMPTS):
            try:
                await self._start(replica)
                return
            except Exception as error:
                # Weights may have been overwritten by newer ones just as it read them.
                if attempt == START_ATTEMPTS - 1:
                    await self._give_up(error)  # whoever waits for a generator is told

    async def _give_up(self, error: BaseException) -> None:
        async with self._changed:
            self._failure = error
            self._changed.notify_all()

    async def _answer(
        self,
        replica: Replica,
        what: str,
        call: Awaitable[Answer],
        gone: asyncio.Event | None = None,
    ) -> Answer:
        who = f"generator {replica.number}"
        waiting = answer(f"{who} to {what}", call, deadline_seconds=self._deadline)
        with self._timeline.span(who, what):
            try:
                return await unless(gone or asyncio.Event(), waiting)
            except Interrupted:
                raise WorkerDiedError(f"while waiting for {who} to {what}, it died") from None


def _died(error: BaseException) -> bool:
    """Whether a call failed because its generator did, and not because of what it was asked."""
    if isinstance(error, WorkerDiedError | SupervisionError | EngineDiedError):
        return True
    return isinstance(error, ActorError) and isinstance(error.exception, EngineDiedError)
