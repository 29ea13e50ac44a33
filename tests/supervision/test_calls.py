"""Waiting: with a deadline that says for whom, and never past a stop."""

import asyncio

import pytest

from torchtitan_rl.core.waiting import Clock, Interrupted, interruptible, together
from torchtitan_rl.supervision.calls import WorkerDiedError, call_with_deadline


async def value(result):
    return result


async def failure(error):
    raise error


async def forever(seen=None):
    """Never answers; notes in `seen` that it was started, and how it ended."""
    seen = [] if seen is None else seen
    seen.append("started")
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        seen.append("cancelled")
        raise


class Reply:
    """Awaitable but no coroutine, as Monarch's futures are."""

    def __await__(self):
        yield from value(7).__await__()
        return 7


@pytest.mark.parametrize("make", [lambda: value(7), Reply])
async def test_an_answer_in_time_is_returned(make):
    assert await call_with_deadline("anyone", make(), deadline_seconds=60) == 7
    assert await interruptible(asyncio.Event(), make()) == 7


async def test_the_deadline_says_who_was_waited_for_and_how_long():
    seen = []
    with pytest.raises(TimeoutError, match=r"waited 0 s for the trainer to save.*deadline_seconds"):
        await call_with_deadline("the trainer to save", forever(seen), deadline_seconds=0.01)
    assert seen == ["started", "cancelled"]


async def test_an_error_of_the_actor_comes_through():
    with pytest.raises(KeyError, match="lost"):
        await call_with_deadline("anyone", failure(KeyError("lost")), deadline_seconds=60)
    with pytest.raises(KeyError, match="lost"):
        await interruptible(asyncio.Event(), failure(KeyError("lost")))


async def test_a_timeout_of_the_actors_own_is_not_taken_for_the_deadline():
    with pytest.raises(TimeoutError, match="the actor's own"):
        await call_with_deadline(
            "anyone", failure(TimeoutError("the actor's own")), deadline_seconds=3600
        )


async def test_the_death_of_who_should_reply_ends_the_wait():
    seen, gone = [], asyncio.get_running_loop().create_future()
    calls = [
        asyncio.ensure_future(
            call_with_deadline("the grader to grade", forever(seen), deadline_seconds=60, gone=gone)
        )
        for _ in range(3)
    ]
    while len(seen) < 3:
        await asyncio.sleep(0)
    gone.set_result(None)
    for call in calls:
        with pytest.raises(WorkerDiedError, match="waiting for the grader to grade, it died"):
            await call
    assert seen == ["started"] * 3 + ["cancelled"] * 3


async def test_a_reply_counts_though_who_gave_it_has_died():
    gone = asyncio.get_running_loop().create_future()
    reply = asyncio.ensure_future(value(7))
    await reply
    gone.set_result(None)
    assert await call_with_deadline("anyone", reply, deadline_seconds=60, gone=gone) == 7


async def test_a_stop_interrupts_and_drops_the_work():
    stop, seen = asyncio.Event(), []
    waiting = asyncio.ensure_future(interruptible(stop, forever(seen)))
    while not seen:
        await asyncio.sleep(0)
    assert not waiting.done()
    stop.set()
    with pytest.raises(Interrupted):
        await waiting
    assert seen == ["started", "cancelled"]


async def test_a_stop_that_came_before_interrupts_too():
    stop = asyncio.Event()
    stop.set()
    with pytest.raises(Interrupted):
        await interruptible(stop, forever())


async def test_work_that_is_done_is_returned_though_a_stop_came():
    stop = asyncio.Event()

    async def work():
        stop.set()
        return 7

    assert await interruptible(stop, work()) == 7


async def test_cancelling_the_wait_cancels_the_work():
    seen = []
    waiting = asyncio.ensure_future(interruptible(asyncio.Event(), forever(seen)))
    while not seen:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert seen == ["started", "cancelled"]


async def test_nothing_is_left_running():
    before = asyncio.all_tasks()
    await interruptible(asyncio.Event(), value(7))
    await together(value(1), value(2))
    assert asyncio.all_tasks() == before


async def test_together_gives_all_answers_in_order():
    assert await together(value(1), Reply(), value(3)) == [1, 7, 3]
    assert await together() == []


async def test_one_failure_ends_the_others_before_it_is_raised():
    seen = []
    with pytest.raises(KeyError, match="lost"):
        await together(forever(seen), failure(KeyError("lost")))
    assert seen == ["started", "cancelled"]


def test_a_clock_has_the_seconds_of_each_phase_that_ended():
    clock = Clock()
    with clock("generate"), clock("inner"):
        pass
    assert clock.seconds.keys() == {"generate", "inner"}
    assert clock.seconds["generate"] >= clock.seconds["inner"] >= 0
