"""Waiting for actors: never forever, and never past the user's Ctrl-C."""

import asyncio
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Answer = TypeVar("Answer")


class Interrupted(Exception):
    """The user asked the run to stop."""


async def answer(what: str, reply: Awaitable[Answer], *, deadline_seconds: float) -> Answer:
    """Wait for an actor's reply; at the deadline, say who was waited for."""
    try:
        return await asyncio.wait_for(_as_coroutine(reply), deadline_seconds)
    except TimeoutError:
        raise TimeoutError(
            f"waited {deadline_seconds:.0f} s for {what}; look into the run's logs folder, or "
            "raise deadline_seconds if it only needs longer"
        ) from None


async def unless(stop: asyncio.Event, work: Awaitable[Answer]) -> Answer:
    """Await `work`, but drop it and raise Interrupted as soon as `stop` is set."""
    task = asyncio.ensure_future(_as_coroutine(work))
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Interrupted
        return task.result()
    finally:
        task.cancel()
        stopped.cancel()


async def _as_coroutine(awaitable: Awaitable[Answer]) -> Answer:
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
