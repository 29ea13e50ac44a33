"""Waiting for several things at once, until they are done or nobody needs them; without Monarch."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torchtitan_rl.core.errors import TorchtitanRLError

Result = TypeVar("Result")


class Interrupted(TorchtitanRLError):
    """The user asked the run to stop."""


async def interruptible(stop: asyncio.Event, work: Awaitable[Result]) -> Result:
    """Await `work`, but drop it and raise Interrupted as soon as `stop` is set."""
    task = as_task(work)
    stopped = asyncio.ensure_future(stop.wait())
    either: set[asyncio.Future] = {task, stopped}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Interrupted
        return task.result()
    finally:
        await cancel(task, stopped)


async def together(*work: Awaitable[Result]) -> list[Result]:
    """Await all; if one fails, cancel the others and let them clean up before the error goes on."""
    tasks = [as_task(w) for w in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel(*tasks)


async def cancel(*tasks: asyncio.Future) -> None:
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # asked for, so that Python does not print one that came too late
    if left:
        await asyncio.gather(*left, return_exceptions=True)


def as_task(awaitable: Awaitable[Result]) -> asyncio.Future[Result]:
    # A coroutine as it is: in a wrapper that is cancelled before it starts, it would never be
    # awaited, and Python would say so.
    if inspect.iscoroutine(awaitable):
        return asyncio.ensure_future(awaitable)
    return asyncio.ensure_future(_as_coroutine(awaitable))


async def _as_coroutine(awaitable: Awaitable[Result]) -> Result:
    # Monarch's futures are awaitable but no coroutines, which asyncio's tools insist on.
    return await awaitable


class Clock:
    """Seconds per phase.

    Example:
        clock = Clock()
        with clock("generate"):
            ...
        clock.seconds["generate"]
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - started
