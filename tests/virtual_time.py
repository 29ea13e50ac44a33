"""An asyncio event loop in which waiting takes no time: its clock jumps to the next timer.

Thousands of schedules with timeouts of minutes run in seconds, and always in the same order.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class DeadlockError(AssertionError):
    """Nothing is ready, no timer is set, and still somebody waits."""


class _JumpingSelector(selectors.SelectSelector):
    """Asked to wait for the next timer, moves the clock there instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list:
        if timeout is None:
            raise DeadlockError(f"deadlock at {self.now} s: nothing will ever happen again")
        self.now += max(timeout, 0.0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop for coroutines that wait only for each other and for timers: no threads.

    What is reported to the loop, such as a task's exception that nobody retrieved, is kept.
    """

    def __init__(self) -> None:
        self.reported: list[dict[str, Any]] = []
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self.set_exception_handler(lambda _, context: self.reported.append(context))

    def time(self) -> float:
        return self._jumping.now

    def block(self, seconds: float) -> None:
        """Move the clock as if the caller had computed for so long, and held up everyone else."""
        self._jumping.now += seconds


def run(main: Coroutine[Any, Any, Result], *, reports: int = 0) -> Result:
    """Run `main` in virtual time; fail on a deadlock, and unless this much was reported."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualTimeLoop)
        result = runner.run(main)
        left = asyncio.all_tasks(loop)
    assert not left, f"tasks left behind: {left}"
    assert len(loop.reported) == reports, loop.reported
    return result
