"""Turns of trainer and generators: in virtual time, interrupted at any moment."""

import asyncio
import random
from types import SimpleNamespace

from tests.virtual_time import run
from torchtitan_rl.run.turns import Turns

SEEDS = 300


class World:
    """A trainer and generators whose calls take a while, go on if nobody waits for them any more,
    and follow one another. They note who has memory."""

    def __init__(self, rng):
        self.rng, self.log = rng, []
        self.resident, self.awake = True, False
        self.queues = {"trainer": asyncio.Lock(), "generators": asyncio.Lock()}
        self.calls = set()
        trainer = SimpleNamespace(
            sleep=SimpleNamespace(call=lambda: self.call("trainer", False)),
            wake=SimpleNamespace(call=lambda: self.call("trainer", True)),
        )
        self.generators = SimpleNamespace(
            sleep=lambda: self.call("generators", False), wake=lambda: self.call("generators", True)
        )
        self.trainer = SimpleNamespace(actor=trainer)

    def call(self, who, has_memory):
        async def perform():
            async with self.queues[who]:
                await asyncio.sleep(self.rng.random())
                if who == "trainer":
                    self.resident = has_memory
                else:
                    self.awake = has_memory
                self.log.append((who, has_memory))
                # Whoever takes memory finds that the other has given it back.
                assert not (self.resident and self.awake)
                return {0: 5} if who == "trainer" and not has_memory else 7

        task = asyncio.ensure_future(perform())
        self.calls.add(task)
        return asyncio.shield(task)

    async def wait(self, _who, _what, reply):
        return await reply


def turns_in(world, *, colocated=True):
    return Turns(world, world.wait, colocated=colocated)


def test_whose_turn_it_is_has_memory_and_the_other_has_not_whatever_was_interrupted():
    interrupted = 0
    for seed in range(SEEDS):
        rng = random.Random(seed)

        async def scenario(rng=rng):
            nonlocal interrupted
            world = World(rng)
            turns = turns_in(world)
            for _ in range(8):
                wants_trainer = rng.random() < 0.5
                change = turns.trainer() if wants_trainer else turns.generators()
                try:
                    async with asyncio.timeout(rng.choice([None, rng.random() * 2])):
                        await change
                except TimeoutError:
                    interrupted += 1
                    continue
                assert (world.resident, world.awake) == (wants_trainer, not wants_trainer)
            await asyncio.gather(*world.calls)

        run(scenario())
    assert interrupted > SEEDS


def test_only_a_change_calls_anybody_and_is_measured():
    async def scenario():
        world = World(random.Random(0))
        turns = turns_in(world)
        await turns.trainer()  # its is the first
        assert world.log == []
        for _ in range(2):
            await turns.generators()
        assert world.log == [("trainer", False), ("generators", True)]
        await turns.trainer()
        assert world.log[2:] == [("generators", False), ("trainer", True)]
        metrics = turns.take_metrics()
        assert metrics.pop("turns/seconds") > 0
        assert metrics == {"turns/trainer_gib": 5 / 2**30, "turns/generator_gib": 7 / 2**30}
        assert turns.take_metrics() == {}

    run(scenario())


def test_separate_actors_have_no_turns():
    async def scenario():
        world = World(random.Random(0))
        turns = turns_in(world, colocated=False)
        for _ in range(2):
            await turns.generators()
            await turns.trainer()
        assert world.log == []
        assert turns.take_metrics() == {}

    run(scenario())
