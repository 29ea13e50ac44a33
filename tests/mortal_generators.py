"""Generators whose processes die, hang and fail to start on demand, in virtual time."""

import asyncio
import random
from dataclasses import dataclass, field
from types import SimpleNamespace

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from tests.virtual_time import run
from torchtitan_rl.actors.interfaces import SampleRequest
from torchtitan_rl.config import SamplingConfig
from torchtitan_rl.core.errors import ActorBrokenError
from torchtitan_rl.core.types import Completion
from torchtitan_rl.supervision.generators import Generators
from torchtitan_rl.weight_sync.handle import WeightHandle

DEADLINE = 10.0
DEADLY, BAD = 666, 13
"""Tokens: over one the engine dies, the other it refuses."""


@dataclass
class World:
    """What becomes of processes and calls: each chance is that of a call, or of a process."""

    seed: int = 0
    die: float = 0.0
    hang: float = 0.0
    refuse: float = 0.0
    no_start: float = 0.0
    idle_death: float = 0.0
    no_end: float = 0.0
    longest: float = 1.0
    """Seconds that anything takes."""
    pulled: int = 0
    """Version of the last pull that was completed."""
    stale: bool = False
    """Whether anybody was asked who served older weights than that."""
    trainers_turn: bool = False
    """Whether the generators are asleep, and what they use is another's."""
    crowded: bool = False
    """Whether a process has had memory in the trainer's turn."""
    made: list["Process"] = field(default_factory=list)
    calls: list = field(default_factory=list)

    def __post_init__(self):
        self.rng = random.Random(self.seed)

    def happens(self, chance):
        return self.rng.random() < chance

    async def work(self):
        await asyncio.sleep(self.rng.randrange(5) / 4 * self.longest)

    async def spawn(self, number):
        self.crowded |= self.trainers_turn
        await self.work()
        if self.happens(self.hang):
            await asyncio.Event().wait()
        if self.happens(self.no_start):
            raise OSError("out of memory")
        self.made.append(Process(self, number))
        self.crowded |= self.trainers_turn
        return self.made[-1]

    def handle(self, version):
        return WeightHandle(version, "shm")

    async def pull(self, generators, version):
        await generators.pull(self.handle(version))
        self.pulled = version

    async def let_train(self, generators, version):
        """The trainer's turn, in which weights of this version are published; then the
        generators'."""
        await generators.sleep()
        self.trainers_turn = True
        for _ in range(2):
            self.crowded |= any(process.has_memory for process in self.made)
            await self.work()
        await generators.pull(self.handle(version))
        self.trainers_turn = False
        await generators.wake()
        self.pulled = version


class Process:
    """A process with an actor, in the place of `Spawned`."""

    lost_host = ""

    async def settle(self):
        pass

    def __init__(self, world, number):
        self.world, self.number = world, number
        self.version, self.ended, self.deaf, self.asleep = 0, False, False, False
        self.dies_at = world.rng.random() * 20 if world.happens(world.idle_death) else 1e9
        self.born = asyncio.get_running_loop().time()
        self.actor = SimpleNamespace(
            generate=SimpleNamespace(call_one=self.generate),
            pull_weights=SimpleNamespace(call_one=self.pull_weights),
            cancel=SimpleNamespace(call_one=self.cancel),
            sleep=SimpleNamespace(call_one=self.sleep),
            wake=SimpleNamespace(call_one=self.wake),
        )

    @property
    def alive(self):
        return not self.ended and asyncio.get_running_loop().time() < self.born + self.dies_at

    @property
    def has_memory(self):
        return self.alive and not self.asleep

    def die(self):
        self.dies_at = 0.0

    async def stop(self):
        await self.world.work()
        if self.world.happens(self.world.no_end):
            raise OSError("cannot be ended")
        self.ended = True

    async def answer(self, *, refuse):
        """Work for a while, and perhaps die over it."""
        world = self.world
        self.deaf = self.deaf or world.happens(world.hang)
        await world.work()
        if self.deaf or not self.alive:  # of a process that is gone, Monarch says nothing
            await asyncio.Event().wait()
        if world.happens(world.die):
            self.die()
            how = world.rng.randrange(4)
            if how == 0:
                raise SupervisionError("its process died")
            if how == 1:
                raise ActorBrokenError("the engine died")
            if how == 2:
                raise ActorError(ActorBrokenError("the engine died"))
            await asyncio.Event().wait()
        if world.happens(refuse):
            raise ActorError(RuntimeError("refused"))

    async def generate(self, prompts, *, sampling_config, group_ids, sample_numbers):
        self.world.stale |= self.version < self.world.pulled
        self.world.calls.append((self.number, group_ids))
        assert not self.asleep
        version = self.version
        await self.answer(refuse=self.world.refuse)
        if any(DEADLY in prompt for prompt in prompts):
            raise ActorError(ActorBrokenError("the engine died"))
        if any(BAD in prompt for prompt in prompts):
            raise ActorError(ValueError("a bad prompt"))
        assert {sampling.n for sampling in sampling_config} == {1}
        return [
            Completion(version, index, prompt, f"{name} {number}", [1])
            for index, (prompt, name, number) in enumerate(
                zip(prompts, group_ids, sample_numbers, strict=True)
            )
        ]

    async def pull_weights(self, handle):
        await self.answer(refuse=0.0)  # that would end the run, and should
        self.version = handle.version

    async def sleep(self):
        await self.answer(refuse=0.0)
        self.asleep = True
        return 100

    async def wake(self, handle):
        await self.pull_weights(handle)
        self.asleep = False

    async def cancel(self, names):
        if self.deaf:
            await asyncio.Event().wait()


def sample(generators, prompts, n=2, name="group"):
    """`n` samples of each prompt; each prompt is of a group of its own."""
    return generators.sample(
        [
            SampleRequest(prompt, SamplingConfig(), f"{name} {i}", f"{name} {i}", number)
            for i, prompt in enumerate(prompts)
            for number in range(n)
        ]
    )


def loads(generators):
    return [replica.load for replica in generators.pool.replicas]


def in_virtual_time(world, count, scenario, **options):
    """Run `scenario(generators)`; whatever happened, nothing is left of it."""

    async def main():
        generators = Generators(world.spawn, count, **{"deadline_seconds": DEADLINE, **options})
        await generators.start()
        try:
            await scenario(generators)
        finally:
            await generators.stop()
            while any(replica.processes for replica in generators.pool.replicas):
                await generators.stop()  # some could not be ended
        await asyncio.sleep(0)
        assert not world.stale
        assert not world.crowded
        assert loads(generators) == [0] * count
        assert all(process.ended for process in world.made)
        assert not generators.pool._tasks

    run(main())
