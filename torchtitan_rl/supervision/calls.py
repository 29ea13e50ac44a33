"""Calls of actors that never wait for ever, and say who was waited for."""

import asyncio
from collections.abc import Awaitable

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.core.waiting import Result, as_task, cancel


class WorkerDiedError(TorchtitanRLError, RuntimeError):
    """A process died while its answer was waited for."""


class DeadlineError(TorchtitanRLError, TimeoutError):
    """Nobody answered in time; not to be taken for a TimeoutError that an actor answers with."""


async def call_with_deadline(
    what: str, reply: Awaitable[Result], *, deadline_seconds: float
) -> Result:
    """Wait for an actor's reply; if none comes, say who was waited for and why it did not come."""
    task = as_task(reply)
    try:
        # Not `wait_for`: a TimeoutError may also be what the actor answered.
        if (await asyncio.wait({task}, timeout=deadline_seconds))[0]:
            return task.result()
    except SupervisionError as error:
        raise WorkerDiedError(f"while waiting for {what}, its process died: {error}") from error
    finally:
        await cancel(task)
    raise DeadlineError(
        f"waited {deadline_seconds:.0f} s for {what}; look into the run's logs folder, or "
        "raise supervision.deadline_seconds if it only needs longer"
    )
