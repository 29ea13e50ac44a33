"""The stream of groups under thousands of random schedules, in virtual time."""

import asyncio
import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.virtual_time import DeadlockError, run
from torchtitan_rl.config.stream import StreamConfig
from torchtitan_rl.rollout.stream import RolloutStream

many = partial(settings, deadline=None, print_blob=True)


@dataclass
class World:
    """How groups behave: a function of the seed and their index, whenever they start."""

    config: StreamConfig
    steps: int
    seed: int = 0
    first_step: int = 0
    end: bool = True
    """Whether the stream knows where the run ends."""
    fail: float = 0.0
    hang: float = 0.0
    useless: float | None = None
    """None: no dynamic sampling."""
    generate: float = 4.0
    """Longest time of a group."""
    learn: float = 4.0
    """Longest time of a training step."""
    engine: int = 0
    """Groups that generate at once; 0: all."""
    started: list = field(default_factory=list)
    log: list = field(default_factory=list)

    def chance(self, what):
        return random.Random(f"{self.seed}/{what}")

    def fate(self, index):
        """How a group ends, and after how long."""
        rng = self.chance(index)
        fate, seconds = rng.random(), rng.randrange(4) / 4 * self.generate
        if fate < self.fail:
            return "failed", seconds
        if fate < self.fail + self.hang:
            return "timed_out", None
        return ("not_useful" if rng.random() < (self.useless or 0.0) else "useful"), seconds

    def expected(self, step):
        """The groups of a step, by trying one after the other."""
        found, tried, number = [], 0, 0
        while len(found) < self.config.prompts_per_step and tried < self.config.tries:
            index = self.config.index(step, number)
            number += 1
            fate = self.fate(index)[0]
            tried += fate in ("not_useful", "useful")
            found += [index] * (fate == "useful")
        return found


@dataclass(eq=False)
class Work:
    index: int
    version: int


def open_stream(world):
    room = asyncio.Semaphore(world.engine) if world.engine else nullcontext()

    def start(index):
        world.started.append(Work(index, stream.steps_done))
        check(stream, starting=1)
        world.log.append((asyncio.get_running_loop().time(), "start", index))
        return world.started[-1]

    async def play(work):
        fate, seconds = world.fate(work.index)
        try:
            async with room:
                await (asyncio.Event().wait() if seconds is None else asyncio.sleep(seconds))
        except asyncio.CancelledError:
            await asyncio.sleep(world.chance(f"clean {work.index}").randrange(3))
            raise
        world.log.append((asyncio.get_running_loop().time(), fate, work.index))
        if fate == "failed":
            raise ValueError(f"group {work.index}")
        return work

    stream = RolloutStream(
        world.config,
        start=start,
        play=play,
        useful=None
        if world.useless is None
        else (lambda work: world.fate(work.index)[0] == "useful"),
        first_step=world.first_step,
        end_step=world.first_step + world.steps if world.end else None,
    )
    stream.world = world
    return stream


def check(stream, starting=0):
    """What holds at every moment; `starting` groups are made and not yet counted."""
    config, world = stream.config, stream.world
    ended = sum(stream.counts.values())
    assert stream.started == stream.running + stream.waiting + ended
    assert stream.started + starting == len(world.started)
    steps = config.max_offpolicy_steps + stream.steps_done + 1 - world.first_step
    live = stream.counts["trained"] + stream.waiting + stream.running + starting
    in_flight = (config.max_offpolicy_steps + 1) * config.oversample
    assert live <= steps * config.prompts_per_step + in_flight


async def train(stream, batches):
    """Every step, checked; appends to `batches`, so that they are there even if it is stopped."""
    config, world = stream.config, stream.world
    for step in range(world.first_step, world.first_step + world.steps):
        batch = await stream.batch(step)
        batches.append(batch)
        check(stream)
        assert all(0 <= step - work.version <= config.max_offpolicy_steps for work in batch)
        assert [work.index for work in batch] == sorted(work.index for work in batch)
        if world.useless is None:
            assert len(batch) == config.prompts_per_step
        await asyncio.sleep(world.chance(f"step {step}").randrange(4) / 4 * world.learn)
        stream.advance(step + 1)
        check(stream)


async def closed(stream, batches):
    """Close, and see that every group that was started has ended exactly once."""
    await stream.close()
    check(stream)
    assert (stream.running, stream.waiting) == (0, 0)
    trained = [work for batch in batches for work in batch]
    discarded = stream.take_discarded()
    ends = [*trained, *(end.work for end in discarded)]
    assert len(ends) == len(set(map(id, ends))) == stream.started
    assert set(map(id, ends)) == set(map(id, stream.world.started))
    assert len({work.index for work in ends}) == len(ends)
    for end in discarded:
        fate = stream.world.fate(end.index)[0]
        assert end.reason
        if end.kind in ("failed", "not_useful"):
            assert fate == end.kind
        elif end.kind == "timed_out":
            assert fate == "timed_out" or stream.world.engine
        else:
            assert end.kind == "cancelled"
    for kind in ("not_useful", "failed", "timed_out", "cancelled"):
        assert stream.counts[kind] == sum(end.kind == kind for end in discarded)
    assert stream.counts["trained"] == len(trained)
    stopped = stream.started
    await asyncio.sleep(1000)
    assert stream.started == stopped


@st.composite
def worlds(draw, oversample=st.integers(0, 2), ahead=st.integers(0, 4)):
    prompts, extra = draw(st.integers(1, 4)), draw(oversample)
    rates = st.sampled_from([0.0, 0.1, 0.5])
    useless = draw(st.sampled_from([None, 0.0, 0.3, 0.9]))
    tries = 0 if useless is None else prompts + extra + draw(st.integers(0, 4))
    config = StreamConfig(
        prompts_per_step=prompts,
        max_offpolicy_steps=draw(ahead),
        max_groups_per_step=tries,
        oversample=extra,
        timeout_seconds=50,
        deadline_seconds=1e6,
        max_failures_in_a_row=10_000,
    )
    return World(
        config,
        steps=draw(st.integers(1, 6)),
        seed=draw(st.integers(0, 2**32)),
        first_step=draw(st.integers(0, 3)),
        end=draw(st.booleans()),
        fail=draw(rates),
        hang=draw(st.sampled_from([0.0, 0.1, 0.3])),
        useless=useless,
        generate=draw(st.sampled_from([0, 1, 4, 40])),
        learn=draw(st.sampled_from([0, 1, 4, 40])),
        engine=draw(st.sampled_from([0, 0, 1, 3])),
    )


@many(max_examples=1000)
@given(worlds())
def test_every_run_ends_within_the_bounds_and_accounts_for_every_group(world):
    async def main():
        stream, batches = open_stream(world), []
        await train(stream, batches)
        await closed(stream, batches)

    run(main())


@many(max_examples=500)
@given(worlds(), st.integers(0, 400).map(lambda quarters: quarters / 4))
def test_a_close_at_any_moment_accounts_for_every_group(world, moment):
    async def main():
        stream, batches = open_stream(world), []
        training = asyncio.ensure_future(train(stream, batches))
        await asyncio.wait({training}, timeout=moment)
        await closed(stream, batches)
        training.cancel()
        (outcome,) = await asyncio.gather(training, return_exceptions=True)
        closing = isinstance(outcome, RuntimeError) and "closed" in str(outcome)
        assert outcome is None or closing or isinstance(outcome, asyncio.CancelledError), outcome

    run(main())


@many(max_examples=500)
@given(worlds(oversample=st.just(0)))
def test_the_groups_of_a_step_depend_neither_on_timing_nor_on_the_bound(world):
    world.engine = 0  # groups that queue for an engine may time out

    async def main():
        stream, batches = open_stream(world), []
        await train(stream, batches)
        await closed(stream, batches)
        return [[work.index for work in batch] for batch in batches]

    steps = range(world.first_step, world.first_step + world.steps)
    assert run(main()) == [world.expected(step) for step in steps]


@many(max_examples=500)
@given(worlds(ahead=st.just(0)))
def test_the_same_seed_gives_the_same_run_when_synchronous(world):
    async def main():
        world.started, world.log = [], []
        stream, batches = open_stream(world), []
        await train(stream, batches)
        await stream.close()
        return [[work.index for work in batch] for batch in batches], world.log

    first = run(main())
    assert run(main()) == first


@many(max_examples=500)
@given(worlds(oversample=st.just(0), ahead=st.just(0)))
def test_a_synchronous_step_trains_its_own_indices_and_starts_at_its_own_version(world):
    world.fail = world.hang = world.generate = 0  # a group that queues too long times out
    world.useless = None

    async def main():
        stream, batches = open_stream(world), []
        await train(stream, batches)
        await closed(stream, batches)
        return [work for batch in batches for work in batch]

    tries = world.config.tries
    steps = range(world.first_step, world.first_step + world.steps)
    expected = [
        (step * tries + i, step) for step in steps for i in range(world.config.prompts_per_step)
    ]
    assert [(work.index, work.version) for work in run(main())] == expected


@pytest.mark.parametrize(("generate", "learn"), [(4, 3), (3, 4), (5, 5), (8, 1), (1, 8)])
@pytest.mark.parametrize("ahead", [0, 1, 2, 4])
def test_generation_overlaps_training_as_far_as_it_can(generate, learn, ahead):
    async def main():
        engine = asyncio.Semaphore(4)  # one batch at a time

        async def play(work):
            async with engine:
                await asyncio.sleep(generate)

        config = StreamConfig(prompts_per_step=4, max_offpolicy_steps=ahead)
        stream = RolloutStream(config, start=lambda index: index, play=play, end_step=50)
        async with stream:
            for step in range(50):
                assert len(await stream.batch(step)) == 4
                await asyncio.sleep(learn)
                stream.advance(step + 1)
        return asyncio.get_running_loop().time()

    ideal = 50 * max(generate, learn) + min(generate, learn)  # the first or last has no partner
    assert run(main()) == (ideal if ahead else 50 * (generate + learn))


def test_the_virtual_loop_finds_a_deadlock():
    with pytest.raises(DeadlockError):
        run(asyncio.Event().wait())
