"""Generators that share their memory with a trainer, whose processes die at any time: in virtual
time."""

import asyncio
import random

import pytest
from monarch.actor import ActorError

from tests.mortal_generators import DEADLINE, World, in_virtual_time, sample
from torchtitan_rl.actors.interfaces import SampleFailure
from torchtitan_rl.supervision.calls import DeadlineError
from torchtitan_rl.supervision.generators import DeadlyPromptError, GeneratorsAsleepError
from torchtitan_rl.supervision.pool import ActorsDiedError

SEEDS = 300
ACCEPTED = (ActorsDiedError, DeadlineError, DeadlyPromptError)
"""Ends of runs whose generators cannot be replaced."""


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr("torchtitan_rl.supervision.pool.console.print", lambda line, **_: None)


def test_under_any_schedule_no_process_has_memory_in_the_trainers_turn():
    """And after it all samples are those of the newest weights."""
    died = 0
    for seed in range(SEEDS):
        chance = random.Random(f"world {seed}")
        world = World(seed, longest=chance.choice([0.0, 1.0, 3.0]))
        for what in ("die", "no_start", "idle_death"):
            setattr(world, what, chance.choice([0.0, 0.05, 0.3]))
        starting, world.no_start = world.no_start, 0.0

        async def scenario(generators, world=world, starting=starting):
            nonlocal died
            world.no_start = starting
            world.hang = 0.05
            for version in range(1, 6):
                await world.let_train(generators, version)
                if world.happens(0.5):
                    made = await sample(generators, [[version], [7]])
                    made = [c for c in made if not isinstance(c, SampleFailure)]
                    assert {c.policy_version for c in made} <= {version}
            died += generators.pool.deaths.total
            world.hang = 0.0

        try:
            # Any number may die, or the second one in a row is given up.
            most, count = chance.choice([1, 10**6, 10**6]), chance.randrange(1, 4)
            in_virtual_time(world, count, scenario, most_deaths_in_a_row=most)
        except ACCEPTED:
            assert not world.crowded
        except BaseException as error:
            error.add_note(f"seed {seed}: {world}")
            raise
    assert died > SEEDS


def test_one_that_dies_asleep_is_replaced_when_the_others_wake():
    world = World(longest=1.0)

    async def scenario(generators):
        await world.let_train(generators, 1)
        assert await generators.sleep() == 200
        world.trainers_turn = True
        generators.pool.replicas[0].spawned.die()
        await asyncio.sleep(3 * DEADLINE)
        assert generators.pool.deaths.total == 1
        assert len(world.made) == 2
        assert (
            "generator 0: to be replaced when starts are allowed again"
            in generators.pool.describe()
        )
        world.trainers_turn = False
        await generators.pull(world.handle(2))
        await generators.wake()
        world.pulled = 2
        assert len(await sample(generators, [[1]])) == 2  # by the other, at once
        await asyncio.sleep(DEADLINE)
        assert len(generators.pool.alive) == 2
        assert [process.version for process in world.made] == [1, 2, 2]

    in_virtual_time(world, 2, scenario)


def test_a_successor_that_is_on_its_way_is_waited_for_and_sleeps_too():
    world = World(longest=4.0)

    async def scenario(generators):
        await world.pull(generators, 1)
        generators.pool.replicas[0].spawned.die()
        while len(world.made) == 2:  # it starts, and has yet to pull its weights
            await asyncio.sleep(0.1)
        await generators.sleep()
        assert [process.asleep for process in world.made] == [False, True, True]
        assert len(generators.pool.alive) == 2
        await generators.wake()

    in_virtual_time(world, 2, scenario)


@pytest.mark.parametrize("most_deaths", [0, 5])
def test_one_that_hangs_as_it_is_put_to_sleep_is_ended_before_the_trainer_begins(most_deaths):
    """Whether it is replaced or given up."""
    world = World(longest=4.0)

    async def scenario(generators):
        hanging = generators.pool.replicas[0].spawned
        hanging.deaf = True
        await world.let_train(generators, 1)
        assert hanging.ended
        assert len(await sample(generators, [[1]])) == 2
        assert bool(generators.pool.replicas[0].lost) is (most_deaths == 0)

    in_virtual_time(world, 2, scenario, most_deaths_in_a_row=most_deaths)


def test_who_asks_sleeping_generators_is_refused_at_once():
    world = World(longest=1.0)

    async def scenario(generators):
        await world.pull(generators, 1)
        await generators.sleep()
        started = asyncio.get_running_loop().time()
        with pytest.raises(GeneratorsAsleepError, match="wake them first"):
            await sample(generators, [[1]])
        with pytest.raises(GeneratorsAsleepError, match="wake them first"):
            await generators.sample_on_each([1], None)
        assert asyncio.get_running_loop().time() == started
        await generators.wake()
        assert len(await sample(generators, [[1]])) == 2

    in_virtual_time(world, 1, scenario)


def test_they_can_be_stopped_asleep():
    world = World(longest=1.0)

    async def scenario(generators):
        await world.pull(generators, 1)
        await generators.sleep()
        generators.pool.replicas[0].spawned.die()
        await asyncio.sleep(DEADLINE)
        await generators.stop()
        assert len(world.made) == 2

    in_virtual_time(world, 2, scenario)


def test_weights_that_cannot_be_read_as_they_wake_end_the_run():
    world = World(longest=0.0)

    async def scenario(generators):
        await world.pull(generators, 1)
        await generators.sleep()

        async def wake(handle):
            raise ActorError(RuntimeError("stale"))

        generators.pool.replicas[0].spawned.actor.wake.call_one = wake
        with pytest.raises(ActorError, match="stale"):
            await generators.wake()

    in_virtual_time(world, 1, scenario)
