"""Actors whose host is lost: told apart from those that fail by themselves."""

import asyncio

import pytest

from torchtitan_rl.hosts.link import HostLostError
from torchtitan_rl.supervision.calls import HostGoneError, WorkerDiedError
from torchtitan_rl.supervision.pool import (
    START_ATTEMPTS,
    ActorPool,
    ReplicaDiedError,
    ReplicaLostError,
)

GONE = "host b: silent for 4 s"


class Process:
    """An actor on a host of which it may be known only later that it is lost."""

    alive, machines = True, frozenset({"b"})
    lost_host = ""

    def __init__(self, *, lost: bool = False) -> None:
        self.actor, self.lost = self, lost

    async def settle(self) -> None:
        await asyncio.sleep(0)
        self.lost_host = GONE if self.lost else ""

    async def stop(self) -> None:
        pass


async def soon(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


def starts(*outcomes):
    """A spawn that has these outcomes in turn, and then succeeds."""
    left = list(outcomes)

    async def spawn(number):
        outcome = left.pop(0) if left else Process()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return spawn


@pytest.mark.parametrize(
    "error", [RuntimeError("connection closed by peer"), WorkerDiedError("its process died")]
)
async def test_what_is_said_before_the_loss_is_known_is_taken_for_it(error):
    first = Process()
    pool = ActorPool("reference", starts(first))
    await pool.start()
    first.lost = True  # and nobody knows yet

    async def call(_actor):
        raise error

    with pytest.raises(ReplicaLostError, match=f"reference was lost with {GONE}"):
        await pool.call(pool.replicas[0], "compute logprobs", call)
    assert pool.deaths.in_a_row == 0
    await soon(lambda: pool.alive)
    own = ReplicaDiedError if isinstance(error, WorkerDiedError) else type(error)
    with pytest.raises(own, match=str(error)) as caught:  # on a host that is there
        await pool.call(pool.replicas[0], "compute logprobs", call)
    assert not isinstance(caught.value, ReplicaLostError)
    await pool.stop()


async def test_starts_that_a_lost_host_has_spoilt_do_not_count():
    """However many there are: the replica is not given up."""
    first = Process()
    spoilt = [HostGoneError("gone"), HostLostError("lost")] * START_ATTEMPTS

    async def join(_number, _call):
        if pool.replicas[0].processes[-1].lost:
            raise WorkerDiedError("while waiting for it to pull weights, it died")

    joined_in_vain = [Process(lost=True) for _ in range(START_ATTEMPTS)]
    spawn = starts(first, *spoilt, *joined_in_vain)
    pool = ActorPool("generator", spawn, on_join=join)
    await pool.start()
    first.alive = False
    await soon(lambda: pool.deaths.total and pool.alive)
    assert pool.replicas[0].lost is None
    await pool.stop()


async def test_an_actor_that_is_killed_in_the_first_start_is_started_again():
    pool = ActorPool("grader", starts(WorkerDiedError("killed"), HostLostError("host b")))
    await pool.start()
    assert pool.alive
    await pool.stop()
    killed = [WorkerDiedError("killed")] * START_ATTEMPTS
    with pytest.raises(WorkerDiedError):
        await ActorPool("grader", starts(*killed)).start()
    with pytest.raises(ValueError, match="no such model"):  # to be mended by the user
        await ActorPool("grader", starts(ValueError("no such model"))).start()


async def test_hosts_that_do_not_come_back_are_not_waited_for_for_ever():
    first, back = Process(), asyncio.Event()

    async def ready(_number):
        if pool.deaths.total:
            await back.wait()

    pool = ActorPool("grader", starts(first), ready=ready, host_seconds=0.2)
    await pool.start()
    first.lost_host, first.alive = GONE, False
    await soon(lambda: not pool.alive)
    with pytest.raises(HostLostError, match="no grader is left, and none of their hosts has come"):
        await pool.wait_for_replica()
    back.set()
    await pool.wait_for_replica()
    await pool.stop()
