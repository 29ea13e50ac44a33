"""Several generators as one, whose processes die, hang and fail to start: in virtual time."""

import asyncio
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from tests.mortal_generators import (
    BAD,
    DEADLINE,
    DEADLY,
    Process,
    World,
    in_virtual_time,
    loads,
    sample,
)
from torchtitan_rl.actors.interfaces import SampleFailure
from torchtitan_rl.core.errors import ActorBrokenError
from torchtitan_rl.supervision.calls import DeadlineError
from torchtitan_rl.supervision.generators import DeadlyPromptError
from torchtitan_rl.supervision.pool import ActorsDiedError

SEEDS = 1000
ENDS = (DeadlyPromptError, ActorsDiedError, DeadlineError, ActorError)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """What is said on the console."""
    lines = []
    monkeypatch.setattr(
        "torchtitan_rl.supervision.pool.console.print", lambda line, **_: lines.append(line)
    )
    return lines


# ---- any schedule -----------------------------------------------------------------------------


async def client(world, rng, generators, number, ends):
    await asyncio.sleep(rng.random() * 10)
    tokens = [DEADLY] * world.happens(0.03) + [BAD] * world.happens(0.05)
    prompts = [[number, i, *(tokens if i == 0 else [])] for i in range(rng.randrange(1, 5))]
    n = rng.randrange(1, 3)
    limit = rng.choice([None, None, 0.0, rng.random() * 5])
    floor = world.pulled
    try:
        async with asyncio.timeout(limit):
            made = await sample(generators, prompts, n, f"client {number}")
    except TimeoutError as error:
        ends.append("late" if isinstance(error, DeadlineError) else "cancelled")
        return
    except ENDS as error:
        ends.append(type(error).__name__)
        return
    wanted = [(p, f"client {number} {i} {j}") for i, p in enumerate(prompts) for j in range(n)]
    for (prompt, seed), sample_ in zip(wanted, made, strict=True):
        if isinstance(sample_, SampleFailure):
            assert sample_.kind == "failed"
            assert sample_.reason
        else:
            assert (sample_.prompt_token_ids, sample_.text) == (prompt, seed)
            assert sample_.policy_version >= floor
    assert not all(isinstance(sample_, SampleFailure) for sample_ in made)
    ends.append("made")


async def any_schedule(world, generators, ends):
    rng, before = random.Random(f"clients {world.seed}"), len(ends)

    async def train():
        for version in range(1, 5):
            await asyncio.sleep(rng.random() * 4)
            await world.pull(generators, version)

    clients = [client(world, rng, generators, i, ends) for i in range(rng.randrange(1, 8))]
    tasks = [asyncio.create_task(work) for work in (train(), *clients)]
    if rng.random() < 0.3:  # stopped in the middle
        await asyncio.wait(tasks, timeout=rng.random() * 10)
        await generators.stop()
        if rng.random() < 0.5:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            return
    await asyncio.gather(*tasks)
    assert len(ends) == before + len(clients)
    await asyncio.sleep(DEADLINE + 1)  # one that hangs does not answer a cancellation either
    assert loads(generators) == [0] * len(generators.pool.replicas)


def test_under_any_schedule_every_call_ends_and_nothing_is_left():
    ends: list[str] = []
    for seed in range(SEEDS):
        chance = random.Random(f"world {seed}")
        world = World(seed, longest=chance.choice([0.0, 1.0, 3.0]))
        for what in ("die", "hang", "refuse", "no_start", "idle_death", "no_end"):
            most = 0.05 if what == "hang" else 0.3
            setattr(world, what, chance.choice([0.0, 0.05, most]))
        starting, world.no_start, world.hang = (world.no_start, world.hang), 0.0, 0.0

        async def scenario(generators, world=world, starting=starting):
            world.no_start, world.hang = starting
            await any_schedule(world, generators, ends)

        try:
            in_virtual_time(world, chance.randrange(1, 4), scenario)
        except BaseException as error:
            error.add_note(f"seed {seed}: {world}")
            raise
    assert ends.count("made") > SEEDS
    assert {"cancelled", "DeadlyPromptError", "ActorsDiedError", "ActorError"} < set(ends)


# ---- one thing at a time ----------------------------------------------------------------------


def test_one_that_was_lost_is_tried_again_when_another_dies_and_is_waited_for():
    world = World(longest=0.0)

    async def scenario(generators):
        first, second = generators.pool.replicas
        world.no_start = 1.0
        first.spawned.die()
        await asyncio.sleep(1)
        assert "out of memory" in str(first.lost)
        world.no_start, world.longest = 0.0, 4.0
        second.spawned.die()
        await asyncio.sleep(1)
        assert not generators.pool.alive
        assert len(await sample(generators, [[1]])) == 2
        await asyncio.sleep(20)
        assert generators.pool.alive == [first, second]

    in_virtual_time(world, 2, scenario)


def test_one_that_hangs_is_replaced_whether_it_samples_or_pulls():
    world = World()

    async def scenario(generators):
        generators.pool.replicas[0].spawned.deaf = True
        assert len(await sample(generators, [[1], [2]])) == 4
        assert generators.pool.deaths.total == 1
        generators.pool.replicas[0].spawned.deaf = True
        await world.pull(generators, 1)
        assert generators.pool.deaths.total == 2
        await asyncio.sleep(5)
        assert [process.version for process in world.made if not process.ended] == [1, 1]

    in_virtual_time(world, 2, scenario)


def test_one_that_dies_while_it_starts_is_seen_and_not_waited_for():
    world = World(longest=1.0)

    async def scenario(generators):
        await world.pull(generators, 1)
        generators.pool.replicas[0].spawned.die()
        while len(world.made) == 1:
            await asyncio.sleep(0.1)
        world.made[1].die()  # it is to pull the weights, and will never answer
        async with asyncio.timeout(DEADLINE / 2):
            await sample(generators, [[1]])
        assert len(world.made) == 3
        assert generators.pool.deaths.total == 1

    in_virtual_time(world, 1, scenario, deadline_seconds=1000.0)


def test_one_that_hangs_gets_no_more_work_when_its_callers_give_up():
    world = World()

    async def scenario(generators):
        generators.pool.replicas[0].spawned.deaf = True
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sample(generators, [[1]], n=4), 2)
        assert loads(generators) == [4, 0]
        for name in ("a", "b", "c"):
            assert len(await sample(generators, [[2]], name=name)) == 2
        assert [number for number, _ in world.calls] == [0, 1, 1, 1]
        await asyncio.sleep(DEADLINE + 5)
        assert loads(generators) == [0, 0]
        assert generators.pool.deaths.total == 1

    in_virtual_time(world, 2, scenario)


def test_who_waits_too_long_is_told_what_everyone_does():
    world = World(longest=0.0)

    async def scenario(generators):
        first, second = generators.pool.replicas
        generators.pool._most_deaths = 1
        world.longest = 1000.0  # not even ending one comes to an end
        first.spawned.die()
        await asyncio.sleep(12)
        second.spawned.die()
        state = "generator 0: being replaced for 4. s; generator 1: lost: .*its process has ended"
        with pytest.raises(DeadlineError, match=f"waited 30 s for a generator: {state}"):
            await sample(generators, [[1]])
        world.longest = 0.0

    in_virtual_time(world, 2, scenario)


def test_what_cannot_be_watched_is_said_once_and_the_others_are_still_watched(quiet):
    world = World(longest=0.0)

    class Unwatched(Process):
        @property
        def alive(self):
            raise PermissionError("not yours")

    async def scenario(generators):
        generators.pool.replicas[0].spawned.__class__ = Unwatched
        await asyncio.sleep(5)
        generators.pool.replicas[1].spawned.die()
        await asyncio.sleep(5)
        assert generators.pool.deaths.total == 1
        assert len(generators.pool.alive) == 2
        assert sum("cannot be watched: PermissionError: not yours" in line for line in quiet) == 1

    in_virtual_time(world, 2, scenario)


def test_one_that_cannot_be_ended_is_replaced_all_the_same():
    world = World(longest=0.0)

    async def scenario(generators):
        world.no_end = 1.0
        generators.pool.replicas[0].spawned.die()
        await asyncio.sleep(1)
        assert len(generators.pool.alive) == 1
        assert len(generators.pool.replicas[0].processes) == 2
        world.no_end = 0.0

    in_virtual_time(world, 1, scenario)


def test_a_call_that_is_cancelled_before_it_begins_leaves_no_load():
    async def scenario(generators):
        call = asyncio.create_task(sample(generators, [[1], [2]]))
        await asyncio.sleep(0)  # it has dealt, and no generator is asked yet
        assert loads(generators) == [2, 2]
        call.cancel()
        await asyncio.wait({call})
        assert loads(generators) == [0, 0]

    in_virtual_time(World(), 2, scenario)


@pytest.mark.parametrize("turns", range(40))
def test_a_successor_joins_with_the_weights_of_a_pull_at_any_moment(turns):
    world = World(longest=0.0)

    async def scenario(generators):
        await world.pull(generators, 1)
        generators.pool.replicas[0].spawned.die()
        await asyncio.sleep(0.5)  # it is seen, and from now on a successor starts
        for _ in range(turns):
            await asyncio.sleep(0)
        await world.pull(generators, 2)
        made = await sample(generators, [[1]])
        assert {completion.policy_version for completion in made} == {2}

    in_virtual_time(world, 1, scenario)


def test_a_prompt_that_kills_is_given_up_and_costs_nobody_else_anything():
    world = World()

    async def scenario(generators):
        others = asyncio.gather(*(sample(generators, [[i]], name=f"{i}") for i in range(8)))
        with pytest.raises(DeadlyPromptError, match="3 generators died over group 'deadly 0'"):
            await sample(generators, [[DEADLY]], name="deadly")
        assert not any(isinstance(c, SampleFailure) for made in await others for c in made)
        assert generators.pool.deaths.total == 3
        made = await sample(generators, [[1], [DEADLY], [2], [3]], name="beside")
        assert [isinstance(c, SampleFailure) for c in made[::2]] == [False, True, False, False]
        assert made[2].reason.startswith(
            "DeadlyPromptError: 3 generators died over group 'beside 1'"
        )

    in_virtual_time(world, 2, scenario)


def test_a_bad_prompt_costs_its_neighbours_nothing_and_is_an_error_when_alone(quiet):
    world = World()

    async def scenario(generators):
        await world.pull(generators, 3)
        made = await sample(generators, [[1], [2], [BAD], [4]])
        lost = SampleFailure("failed", "ValueError: a bad prompt")
        assert made[4:6] == [lost, lost]
        assert sum(isinstance(c, SampleFailure) for c in made) == 2
        assert not quiet  # the run says it, together with all else that failed in its step
        for prompts in ([[BAD]], [[BAD], [BAD], [BAD]]):
            with pytest.raises(ActorError, match="a bad prompt"):
                await sample(generators, prompts)
        assert generators.pool.deaths.total == 0

    in_virtual_time(world, 2, scenario)


def test_groups_come_home_until_the_weights_change():
    world = World()

    async def scenario(generators):
        generators.pool.replicas[1].spawned.die()
        await asyncio.sleep(0.5)
        await sample(generators, [[i] for i in range(4)])
        await asyncio.sleep(5)
        await sample(generators, [[i] for i in range(4)])
        assert {number for number, _ in world.calls} == {0}
        await world.pull(generators, 1)
        await sample(generators, [[i] for i in range(4)])
        assert {number for number, _ in world.calls} == {0, 1}

    in_virtual_time(world, 2, scenario)


def test_a_thousand_generators_share_the_work_evenly():
    world = World(longest=0.0)

    async def scenario(generators):
        prompts = [[1000 + i] for i in range(2500)]
        assert len(await sample(generators, prompts, n=1)) == 2500
        assert {number for number, _ in world.calls} == set(range(1000))
        assert Counter(len(names) for _, names in world.calls) == {3: 500, 2: 500}
        # Later turns go where their group is, however loaded; new groups to who has least.
        world.calls.clear()
        again = asyncio.create_task(sample(generators, prompts[:30], n=1))
        await asyncio.sleep(0)
        await sample(generators, prompts[:970], n=1, name="another")
        await again
        assert len({number for number, _ in world.calls}) == 1000

    in_virtual_time(world, 1000, scenario)


def test_a_call_looks_at_no_processes_but_those_of_its_generator(monkeypatch):
    world, looked = World(longest=0.0), Counter()
    alive = Process.alive.fget

    def counted(process):
        looked[process.number] += 1
        return alive(process)

    async def scenario(generators):
        monkeypatch.setattr(Process, "alive", property(counted))
        for i in range(100):
            await sample(generators, [[1000 + i]], n=1, name=f"call {i}")
        monkeypatch.undo()
        assert looked.keys() == {number for number, _ in world.calls}
        assert sum(looked.values()) <= 2 * len(world.calls)  # and once by the fake itself

    in_virtual_time(world, 1000, scenario)


def test_a_generator_that_has_just_died_is_not_called():
    world = World(longest=0.0)

    async def scenario(generators):
        generators.pool.replicas[0].spawned.die()
        assert len(await sample(generators, [[i] for i in range(4)])) == 8
        assert generators.pool.deaths.total == 1
        assert all(process.alive for process in world.made if process.number)
        assert {number for number, _ in world.calls} == {1, 2}

    in_virtual_time(world, 3, scenario)


@pytest.mark.parametrize("seconds", [0.0, 0.5, 1.0, 1.5, 2.0, 2.5])
def test_stop_ends_what_is_being_replaced_and_starts_no_more(seconds):
    world = World(seed=3, longest=3.0)

    async def scenario(generators):
        waiting = asyncio.create_task(sample(generators, [[1]]))
        await asyncio.sleep(0)
        for replica in generators.pool.replicas:
            replica.spawned.die()
        await asyncio.sleep(seconds)
        await generators.stop()
        with pytest.raises(ActorsDiedError, match="were stopped"):
            await waiting
        made = len(world.made)
        with pytest.raises(ActorsDiedError, match="were stopped"):
            await sample(generators, [[1]])
        await asyncio.sleep(20)
        assert len(world.made) == made
        assert all(process.ended for process in world.made)

    in_virtual_time(world, 2, scenario)


@pytest.mark.parametrize(
    "error",
    [SupervisionError("gone"), ActorBrokenError("gone"), ActorError(ActorBrokenError("gone"))],
)
def test_a_death_is_one_however_it_is_told(error):
    async def scenario(generators):
        def dead(*_args, **_more):
            raise error

        victim = generators.pool.replicas[0].spawned
        victim.actor = SimpleNamespace(generate=SimpleNamespace(call_one=dead))
        assert len(await sample(generators, [[1]])) == 2
        assert generators.pool.deaths.total == 1

    in_virtual_time(World(), 1, scenario)
