"""The stream of groups, one schedule at a time: order, bounds, failures, deadlines, close."""

import asyncio
import re
from types import SimpleNamespace

import pytest

from tests.virtual_time import run
from torchtitan_rl.config.stream import SPARES, SPARES_PER_STEP, StreamConfig
from torchtitan_rl.rollout.stream import RolloutStream

HANG = float("inf")


def make_stream(
    plays=None, *, delay=1.0, play=None, useful=None, first_step=0, end_step=None, **config
):
    """A stream that logs what happens. `plays` says, per index, how long a group takes, or the
    error it raises; an error under ("start", index) is raised by the start of that group."""
    config = StreamConfig(**{"timeout_seconds": 100, "deadline_seconds": 1000} | config)
    plays, log = plays or {}, []

    def start(index):
        if ("start", index) in plays:
            raise plays["start", index]
        log.append(("start", index, stream.steps_done, asyncio.get_running_loop().time()))
        return SimpleNamespace(index=index, version=stream.steps_done)

    async def logged(work):
        how = plays.get(work.index, delay)
        if isinstance(how, BaseException):
            raise how
        try:
            await (asyncio.Event().wait() if how == HANG else asyncio.sleep(how))
        except asyncio.CancelledError:
            log.append(("cancelled", work.index))
            raise
        log.append(("end", work.index))

    async def played(work):
        await (play or logged)(work)
        return work

    stream = RolloutStream(
        config,
        start=start,
        play=played,
        useful=useful and (lambda work: useful(work.index)),
        first_step=first_step,
        end_step=end_step,
    )
    stream.log = log
    return stream


def starts(stream):
    return [event[1] for event in stream.log if event[0] == "start"]


def balanced(stream):
    return stream.started == stream.running + stream.waiting + sum(stream.counts.values())


async def train(stream, steps, *, first=0, seconds=0.0):
    """Train all steps; returns the indices of each batch."""
    batches = []
    for step in range(first, first + steps):
        batches.append([work.index for work in await stream.batch(step)])
        assert balanced(stream)
        await asyncio.sleep(seconds)
        stream.advance(step + 1)
        assert balanced(stream)
    await stream.close()
    assert (stream.running, stream.waiting) == (0, 0)
    assert balanced(stream)
    return batches


# ---- order ---------------------------------------------------------------------------------------


def test_without_off_policy_steps_nothing_of_the_next_step_starts_before_its_version():
    stream = make_stream({0: 3, 1: 1, 2: 2}, prompts_per_step=3, end_step=2)
    assert run(train(stream, 2, seconds=5)) == [[0, 1, 2], [3, 4, 5]]
    assert [event[1:] for event in stream.log if event[0] == "start"] == [
        (0, 0, 0),
        (1, 0, 0),
        (2, 0, 0),
        (3, 1, 8),
        (4, 1, 8),
        (5, 1, 8),
    ]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_resumed_run_sees_the_prompts_it_would_have_seen(ahead):
    whole = make_stream(prompts_per_step=2, max_offpolicy_steps=ahead)
    rest = make_stream(prompts_per_step=2, max_offpolicy_steps=ahead, first_step=3)
    assert run(train(whole, 5))[3:] == run(train(rest, 2, first=3)) == [[6, 7], [8, 9]]


def test_a_slow_group_is_not_overtaken():
    stream = make_stream({0: 90, 5: 95}, prompts_per_step=2, max_offpolicy_steps=2)
    assert run(train(stream, 5)) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    begun = [event[1:3] for event in stream.log if event[0] == "start"]
    assert begun[:8] == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 1), (7, 1)]


def test_nothing_is_started_for_steps_the_run_does_not_have():
    stream = make_stream(prompts_per_step=2, max_offpolicy_steps=3, end_step=2)
    run(train(stream, 2))
    assert stream.started == stream.counts["trained"] == 4


# ---- dynamic sampling and oversampling -----------------------------------------------------------


@pytest.mark.parametrize(
    ("useful", "batches"),
    [
        (lambda index: True, [[0, 1], [5, 6]]),
        (lambda index: index % 2, [[1, 3], [5, 7]]),
        (lambda index: index % 5 == 4, [[4], [9]]),  # all tried: what there is
        (lambda index: False, [[], []]),
    ],
)
@pytest.mark.parametrize("ahead", [0, 2])
def test_dynamic_sampling_goes_on_until_enough_are_useful_or_all_are_tried(useful, batches, ahead):
    stream = make_stream(
        {0: 5, 7: 3}, useful=useful, prompts_per_step=2, max_groups_per_step=5,
        max_offpolicy_steps=ahead, end_step=2,
    )  # fmt: skip
    assert run(train(stream, 2)) == batches
    tried = starts(stream)
    assert len(tried) == len(set(tried)) <= 10
    discarded = stream.take_discarded()
    assert {end.kind for end in discarded} <= {"not_useful"}
    assert len(discarded) == stream.counts["not_useful"] == len(tried) - sum(map(len, batches))


def test_oversampling_cancels_the_slowest_when_the_step_is_full():
    stream = make_stream({0: HANG, 6: 50}, prompts_per_step=2, oversample=1)

    async def main():
        batches = await train(stream, 2)
        return batches, asyncio.get_running_loop().time()

    batches, seconds = run(main())
    # Step 1 has indices 3, 4 and 5, all of them in time: the first two are taken.
    assert (batches, seconds) == ([[1, 2], [3, 4]], 2.0)
    assert [(end.index, end.step, end.kind, end.reason) for end in stream.take_discarded()][:2] == [
        (0, 0, "cancelled", "step 0 had enough groups without it"),
        (5, 1, "cancelled", "step 1 had enough groups without it"),
    ]


# ---- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_failed_group_is_recorded_once_and_replaced(ahead):
    plays = {0: ValueError("no reward"), 3: HANG, SPARES + SPARES_PER_STEP: TimeoutError("its own")}
    stream = make_stream(plays, prompts_per_step=2, max_offpolicy_steps=ahead, end_step=3)
    spare = SPARES + SPARES_PER_STEP + 1
    assert run(train(stream, 3)) == [[1, SPARES], [2, spare], [4, 5]]
    ends = {end.index: (end.step, end.kind, end.reason) for end in stream.take_discarded()}
    assert ends == {
        0: (0, "failed", "ValueError: no reward"),
        3: (1, "timed_out", "took longer than 100 s"),
        SPARES + SPARES_PER_STEP: (1, "failed", "TimeoutError: its own"),
    }
    assert stream.take_discarded() == []
    assert (stream.counts["failed"], stream.counts["timed_out"]) == (2, 1)
    assert ("cancelled", 3) in stream.log


def test_a_straggler_that_had_failed_by_itself_is_a_failure():
    async def play(work):
        await asyncio.sleep(1)
        if work.index == 1:
            raise ValueError("at the very moment that the step was full")

    stream = make_stream(play=play, prompts_per_step=1, oversample=1)
    assert run(train(stream, 1))[0] == [0]
    assert stream.take_discarded()[0].kind == "failed"


def test_a_group_that_was_done_when_the_loop_came_to_its_timeout_was_in_time():
    async def play(work):
        if work.index == 0:
            asyncio.get_running_loop().block(200)
        else:
            await asyncio.sleep(0)

    stream = make_stream(play=play, prompts_per_step=2, end_step=1)
    assert run(train(stream, 1)) == [[0, 1]]
    assert stream.counts["trained"] == stream.started


def test_failures_in_a_row_stop_the_run_with_the_last_reason():
    async def main():
        async def play(work):
            await asyncio.sleep(work.index % 7)
            if work.index != 1:
                raise KeyError(f"lost {work.index}")

        stream = make_stream(play=play, prompts_per_step=2, max_failures_in_a_row=5)
        with pytest.raises(RuntimeError, match=r"5 groups failed in a row.*KeyError.*lost") as info:
            await stream.batch(0)
        assert isinstance(info.value.__cause__, KeyError)
        with pytest.raises(RuntimeError, match="5 groups failed"):
            await stream.batch(0)
        failed = stream.counts["failed"]
        await stream.close()
        assert balanced(stream)
        return failed

    # Group 1 finishes after group 0 has failed, so the count begins anew.
    assert run(main()) == 6


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_of_start_comes_from_batch_as_it_is(at, ahead):
    async def main():
        plays = {("start", at): LookupError("no such example")}
        stream = make_stream(plays, prompts_per_step=2, max_offpolicy_steps=ahead)
        with pytest.raises(LookupError, match="no such example"):
            await train(stream, 5)
        await stream.close()
        assert balanced(stream)

    run(main())


def test_an_error_of_useful_comes_from_batch_and_the_group_is_accounted_for():
    async def main():
        stream = make_stream(useful=lambda index: 1 // index, prompts_per_step=2)
        with pytest.raises(ZeroDivisionError):
            await stream.batch(0)
        await stream.close()
        assert stream.counts["failed"] == 1
        assert balanced(stream)

    run(main())


def test_a_group_cancelled_from_within_has_failed_and_one_cancelled_from_outside_breaks():
    async def main(by):
        async def play(work):
            if by == "within":
                raise asyncio.CancelledError
            asyncio.current_task().cancel()
            await asyncio.sleep(1)

        stream = make_stream(play=play, prompts_per_step=1, max_failures_in_a_row=2)
        with pytest.raises(RuntimeError, match=by):
            await stream.batch(0)
        assert stream.counts == stream.counts | {
            "failed": 2 * (by == "within"),
            "cancelled": by == "outside",
        }
        await stream.close()
        assert balanced(stream)

    run(main("within"))
    run(main("outside"))


def test_an_error_that_no_step_meets_is_reported_when_the_stream_closes():
    async def main():
        plays = {2: OSError("late")}
        stream = make_stream(plays, delay=0, prompts_per_step=1, max_failures_in_a_row=1)
        for step in range(2):
            await stream.batch(step)
            stream.advance(step + 1)
        await asyncio.sleep(0)  # step 2 has begun, and nobody asks for it
        assert stream.running == 1
        await asyncio.sleep(0)
        assert stream.counts["failed"] == 1
        await stream.close()
        assert "late" in str(asyncio.get_running_loop().reported[0]["exception"])

    run(main(), reports=1)


def test_what_a_cancelled_group_raises_is_reported():
    async def main():
        async def play(work):
            try:
                await asyncio.Event().wait()
            finally:
                raise OSError("cannot clean up")

        stream = make_stream(play=play, prompts_per_step=1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.batch(0), 5)
        await stream.close()
        assert stream.counts["cancelled"] == 1
        assert "clean up" in str(asyncio.get_running_loop().reported[0]["exception"])

    run(main(), reports=1)


# ---- waiting -------------------------------------------------------------------------------------


def test_the_deadline_says_who_waits_for_what():
    async def main():
        spares = [SPARES + 4 * SPARES_PER_STEP + number for number in range(3)]
        plays = dict.fromkeys((9, *spares), HANG)
        stream = make_stream(plays, prompts_per_step=2, deadline_seconds=250, first_step=4)
        message = (
            "step 4 waited 250 s: 1 of 2 groups are ready, 4 were started, 2 failed, and 1 run: "
            "group spare-4-1 for 50.0 s (started after 4 steps)"
        )
        with pytest.raises(TimeoutError, match=re.escape(message)):
            await stream.batch(4)
        await stream.close()

    run(main())


def test_the_deadline_names_a_step_that_is_never_done():
    async def main():
        stream = make_stream(prompts_per_step=2, max_offpolicy_steps=1, first_step=4)
        await stream.batch(4)
        await stream.batch(5)
        with pytest.raises(TimeoutError, match="groups start after 5 steps, and 4 are done"):
            await stream.batch(6)
        stream.advance(5)
        assert len(await stream.batch(6)) == 2
        await stream.close()

    run(main())


def test_a_cancelled_wait_loses_nothing():
    async def main():
        stream = make_stream(delay=10, prompts_per_step=2)
        for seconds in (1, 8.999):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.batch(0), seconds)
        return await train(stream, 2)

    assert run(main()) == [[0, 1], [2, 3]]


def test_calls_out_of_order_are_refused():
    async def main():
        stream = make_stream(prompts_per_step=1, end_step=1)
        with pytest.raises(ValueError, match="step 1 is not next"):
            await stream.batch(1)
        with pytest.raises(ValueError, match="1 steps cannot be done after 0"):
            stream.advance(1)
        first = asyncio.ensure_future(stream.batch(0))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="already being waited for"):
            await stream.batch(0)
        await first
        with pytest.raises(ValueError, match=r"step 1 .* step 1 of 1"):
            await stream.batch(1)
        await stream.close()
        await stream.close()

    run(main())


def test_closing_wakes_the_waiting_step_and_ends_everything():
    async def main():
        stream = make_stream({0: HANG}, prompts_per_step=2, max_offpolicy_steps=1)
        waiting = asyncio.ensure_future(stream.batch(0))
        await asyncio.sleep(2)
        assert (stream.running, stream.waiting) == (1, 3)
        await stream.close()
        with pytest.raises(RuntimeError, match="closed"):
            await waiting
        assert stream.counts["cancelled"] == stream.started == 4
        assert stream.log[-1] == ("cancelled", 0)

    run(main())


def test_a_group_that_ignores_its_cancellation_keeps_no_slot_and_close_names_it():
    async def main():
        over = asyncio.Event()

        async def play(work):
            while work.index == 0 and not over.is_set():
                try:
                    await over.wait()
                except asyncio.CancelledError:
                    continue

        stream = make_stream(play=play, prompts_per_step=1)
        assert [work.index for work in await stream.batch(0)] == [SPARES]
        with pytest.raises(TimeoutError, match="1 groups to end: group 0 of step 0"):
            await stream.close()
        over.set()
        await stream.close()
        assert balanced(stream)

    run(main())
