"""Calls of actors with a deadline; an error names the actor that did not reply."""

import asyncio
import re
from collections.abc import Awaitable
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.core.waiting import Result, as_task, cancel
from torchtitan_rl.hosts.exits import describe_exit
from torchtitan_rl.hosts.link import HostLostError


class WorkerDiedError(TorchtitanRLError, RuntimeError):
    """A process died while a caller waited for its reply."""


class ProcessEndedError(WorkerDiedError):
    """A process has ended; the message does not yet name the actor and the call."""


class HostGoneError(ProcessEndedError, HostLostError):
    """An actor has ended with its host."""


class DeadlineError(TorchtitanRLError, TimeoutError):
    """Nobody answered in time; not to be taken for a TimeoutError that an actor answers with."""


async def call_with_deadline(
    what: str,
    reply: Awaitable[Result],
    *,
    deadline_seconds: float,
    gone: "asyncio.Future[None] | None" = None,
) -> Result:
    """Wait for an actor's reply; if none comes, the error names actor, call and reason. `gone` is
    done when the actor's process has died."""
    task = as_task(reply)
    waited: set[asyncio.Future[Any]] = {task} if gone is None else {task, gone}
    try:
        # Not `wait_for`: a TimeoutError may also be what the actor answered.
        done, _ = await asyncio.wait(
            waited, timeout=deadline_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if task in done:
            return task.result()
        if done:
            raise WorkerDiedError(f"while waiting for {what}, it died")
    except SupervisionError as error:
        raise WorkerDiedError(
            f"while waiting for {what}, its process {reported_end(error)}"
        ) from error
    except ProcessEndedError as error:
        kind = HostGoneError if isinstance(error, HostGoneError) else WorkerDiedError
        raise kind(f"while waiting for {what}, {error}") from error
    finally:
        await cancel(task)
    raise DeadlineError(
        f"waited {deadline_seconds:.0f} s for {what}; look into the run's logs folder, or "
        "raise supervision.deadline_seconds if it only needs longer"
    )


def reported_end(error: SupervisionError) -> str:
    """How a process ended, as Monarch reports it: the rest of its report is for the logs.

    Example:
        "exited with non-zero code 3", "was killed by signal 9 (SIGKILL)"; if it is none of these,
        all it says
    """
    found = re.findall(r"process this actor was running on (.+)", str(error))
    if not found:
        return f"died: {error}"
    killed = re.search(r"Killed\(sig=(\d+)\)", found[-1])
    return describe_exit(-int(killed[1])) if killed else found[-1].strip()
