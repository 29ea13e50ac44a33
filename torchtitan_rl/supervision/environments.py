"""The environment of a run, replaced when its process dies.

The environment keeps no conversation, so a call that died is made again on its successor. If that
one dies too, every conversation of the call goes on by itself, and the one that kills fails. The
time that a request may take (`EnvironmentRequest.seconds`) is that of all its calls together, and
of the wait for a successor.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_rl.actors.interfaces import EnvironmentRequest, EnvironmentResponse
from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.core.types import Outcome
from torchtitan_rl.observability.timeline import Timeline
from torchtitan_rl.supervision.dispatch import RETRY_THEN_ISOLATE, Dispatcher, Work
from torchtitan_rl.supervision.pool import ActorPool, Ready, ReplicaDiedError, Spawn
from torchtitan_rl.tasks.tools.tool import ToolFailure


class DeadlyRequestError(TorchtitanRLError, RuntimeError):
    """Environment after environment died over a request."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request, and when its time is up, however often it is made."""

    request: EnvironmentRequest
    deadline: float | None
    """Deadline of the call, by the loop's clock; None: no limit."""

    def with_time_left(self) -> EnvironmentRequest:
        """The request, as it is to be made now."""
        if self.deadline is None:
            return self.request
        left = self.deadline - asyncio.get_running_loop().time()
        return replace(self.request, seconds=max(left, 0.0))


MOST_DEATHS_IN_A_ROW = 64
"""Environments that may die with no request answered in between, before the run ends."""


class Environments:
    """The environment of a run; one that dies is replaced by the next.

    Example:
        environments = Environments(lambda number: spawn_environment(config, task))
        await environments.start()
        responses = await environments.respond(requests)
    """

    def __init__(
        self,
        spawn: Spawn,
        *,
        deadline_seconds: float = 1800.0,
        ready: Ready | None = None,
        host_seconds: float = 600.0,
        timeline: Timeline | None = None,
    ) -> None:
        self.pool = ActorPool(
            "environment",
            spawn,
            deadline_seconds=deadline_seconds,
            # Each of a group's samples may make the same deadly call, and each is met alone.
            most_deaths_in_a_row=MOST_DEATHS_IN_A_ROW,
            ready=ready,
            host_seconds=host_seconds,
            timeline=timeline,
        )
        self._dispatcher = Dispatcher(
            self.pool, RETRY_THEN_ISOLATE, what="respond", call=_respond, deadly_error=_deadly_error
        )

    async def start(self) -> None:
        """Spawn the environment."""
        await self.pool.start()

    async def stop(self) -> None:
        """End every process of the environment."""
        await self.pool.stop()

    async def respond(
        self, requests: Sequence[EnvironmentRequest], *, step: int | None = None
    ) -> list[EnvironmentResponse]:
        """A response to each request; one over which environments die is a failure of its own."""
        now = asyncio.get_running_loop().time()
        works = [
            Work[TimedRequest, EnvironmentResponse](
                TimedRequest(request, None if request.seconds is None else now + request.seconds)
            )
            for request in requests
        ]
        await self._dispatcher.run(works, step=step)
        return [_response(work) for work in works]


async def _respond(actor: Any, requests: list[TimedRequest]) -> list[EnvironmentResponse]:
    return await actor.respond.call_one([timed.with_time_left() for timed in requests])


def _deadly_error(
    work: Work[TimedRequest, EnvironmentResponse], error: ReplicaDiedError
) -> Exception:
    return DeadlyRequestError(f"{work.deaths} environments died over it, the last of them {error}")


def _response(work: Work[TimedRequest, EnvironmentResponse]) -> EnvironmentResponse:
    if not isinstance(work.error, DeadlyRequestError):
        return work.outcome
    request = work.payload.request
    outcomes: list[Outcome] = ["raised" for _ in request.calls]
    failures: list[ToolFailure | None] = [ToolFailure(str(work.error)) for _ in request.calls]
    return EnvironmentResponse([], request.state, outcomes, str(work.error), failures)
