"""Several generators as one: real processes, really killed. Their engines are simulated, to start
sooner; tests/runs kills real ones."""

import asyncio
from collections import Counter

import pytest

from torchtitan_rl.actors.interfaces import SampleRequest
from torchtitan_rl.config import GeneratorConfig, SamplingConfig
from torchtitan_rl.core.types import Completion
from torchtitan_rl.supervision.calls import WorkerDiedError
from torchtitan_rl.supervision.generators import Generators
from torchtitan_rl.supervision.pool import ActorsDiedError
from torchtitan_rl.supervision.spawn import spawn_generator

SAMPLING = SamplingConfig(max_tokens=16)
CONFIG = GeneratorConfig(
    backend="simulated", kwargs={"seconds_per_token": 0.01}, sampling=SAMPLING, threads=1
)


@pytest.fixture(scope="module")
async def generators(tiny_model):
    def spawn(number):
        return spawn_generator(CONFIG, model=tiny_model, seed=0)

    generators = Generators(spawn, 2, deadline_seconds=150)
    await generators.start()
    yield generators
    await generators.stop()


def sample(generators, count, sampling=SAMPLING, turn=""):
    return generators.sample(
        [
            SampleRequest([5, 6, i], sampling, f"group {i}", f"group {i}{turn}", number)
            for i in range(count)
            for number in range(2)
        ]
    )


def ids(completions):
    return [(c.prompt_token_ids, c.token_ids) for c in completions]


def prompts(count):
    return [[5, 6, i] for i in range(count) for _ in range(2)]


async def test_work_is_shared_and_comes_back_in_order(generators):
    completions = await sample(generators, 6)
    assert [c.prompt_token_ids for c in completions] == prompts(6)
    assert len({tuple(c.token_ids) for c in completions}) == 12
    homes = Counter(replica.number for replica in generators.router.homes.values())
    assert homes == {0: 3, 1: 3}
    assert [replica.load for replica in generators.pool.replicas] == [0, 0]
    # A later turn goes where its prefix is, however loaded.
    before = dict(generators.router.homes)
    await sample(generators, 6, turn="/0/1")
    assert dict(generators.router.homes) == before


async def test_a_killed_generator_is_replaced_and_nothing_is_lost(generators):
    whole = await sample(generators, 12)
    long = SamplingConfig(max_tokens=100)
    under_way = asyncio.ensure_future(sample(generators, 12, long))
    while not any(replica.load for replica in generators.pool.replicas):
        await asyncio.sleep(0.01)
    victim = generators.pool.replicas[1].spawned
    for process in victim.processes:
        process.kill()
    made = await under_way
    assert [c.prompt_token_ids for c in made] == prompts(12)
    assert all(len(c.token_ids) <= 100 for c in made)
    assert generators.pool.deaths.total == 1
    for process in generators.pool.replicas[0].spawned.processes:  # it is idle: no call tells of it
        process.kill()
    async with asyncio.timeout(60):
        while generators.pool.deaths.total < 2 or len(generators.pool.alive) < 2:
            await asyncio.sleep(0.05)
    assert generators.pool.replicas[1].spawned is not victim
    assert generators.pool.deaths.total == 2
    # The same samples as ever: seeds belong to groups, not to generators.
    assert ids(await sample(generators, 12)) == ids(whole)
    assert generators.pool.deaths.in_a_row == 0


async def test_generators_that_only_die_end_the_run_with_a_reason():
    class Dead:
        alive = True
        lost_host = ""

        async def settle(self):
            pass

        async def stop(self):
            pass

        @property
        def actor(self):
            raise WorkerDiedError("its process died: out of memory")

    async def spawn(number):
        return Dead()

    doomed = Generators(spawn, 2, most_deaths_in_a_row=3)
    await doomed.start()
    with pytest.raises(ActorsDiedError, match=r"one after the other.*out of memory"):
        async with asyncio.timeout(10):
            await sample(doomed, 4)
    await doomed.stop()


async def test_one_that_cannot_be_started_again_is_told_to_who_waits():
    started = 0

    class Dying:
        alive = True
        lost_host = ""

        async def settle(self):
            pass

        async def stop(self):
            pass

        @property
        def actor(self):
            raise WorkerDiedError("gone")

    async def spawn(number):
        nonlocal started
        started += 1
        if started > 1:
            raise OSError("no memory left")
        return Dying()

    doomed = Generators(spawn, 1)
    await doomed.start()
    with pytest.raises(ActorsDiedError, match="no memory left"):
        async with asyncio.timeout(10):
            await sample(doomed, 1)


async def test_one_that_cannot_be_replaced_does_not_end_the_others():
    """The first sampler dies for good; the second goes on alone."""
    started: list[int] = []

    class Sampler:
        alive = True
        lost_host = ""

        async def settle(self):
            pass

        def __init__(self, number):
            self.number = number

        async def stop(self):
            pass

        @property
        def actor(self):
            if self.number == 0:
                raise WorkerDiedError("gone")
            return self

        @property
        def generate(self):
            return self

        async def call_one(self, prompts, **_how):
            return [Completion(0, index, prompt, "", [1]) for index, prompt in enumerate(prompts)]

    async def spawn(number):
        started.append(number)
        if started.count(0) > 1:
            raise OSError("no memory left")
        return Sampler(number)

    pair = Generators(spawn, 2)
    await pair.start()
    for _ in range(3):
        async with asyncio.timeout(10):
            assert [c.prompt_token_ids for c in await sample(pair, 4)] == prompts(4)
    assert [replica.number for replica in pair.pool.alive] == [1]
    await pair.stop()
