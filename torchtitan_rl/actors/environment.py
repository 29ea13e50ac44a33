"""Environment: a task's tools and its answers, for conversations of several turns."""

import asyncio
import math
import pickle
from typing import Any, TypeAlias

from monarch.actor import Actor, concurrent_endpoint

from torchtitan_rl.actors.interfaces import EnvironmentRequest, EnvironmentResponse
from torchtitan_rl.config.environment import EnvironmentConfig
from torchtitan_rl.core.plugins import nearest
from torchtitan_rl.core.types import Message
from torchtitan_rl.core.waiting import together
from torchtitan_rl.tasks.task import Task
from torchtitan_rl.tasks.tools.calls import (
    MAX_ERROR_CHARS,
    Call,
    Member,
    Offer,
    Result,
    clean,
    failed,
    make_async,
    packed,
    shortened,
)
from torchtitan_rl.tasks.tools.tool import ToolCall, ToolFailure
from torchtitan_rl.tasks.tools.workers import ProcessEndedError, Workers

MAX_NAME_CHARS = 64
"""Longest text that counts as the name of a tool."""


class Environment(Actor):
    """Makes the model's tool calls. It keeps no conversation: its state comes and goes with it.

    Nothing a tool does is an error here: the model is shown it, and may do better. Tools and
    answers run in worker processes that are killed if they take too long, so that no tool can hold
    up another; `async def` ones run on the event loop, so they must wait and not compute. A worker
    is used again, by any conversation: what a tool has to remember belongs into the state.

    Example:
        environment = await spawn_environment(Environment.Config(), Calculator.Config())
        call = ToolCall("calculator", {"expression": "12+34"})
        request = EnvironmentRequest("calculator", messages, [call], state={})
        [response] = await environment.actor.respond.call_one([request])
        response.messages  # [{"role": "tool", "name": "calculator", "content": "46"}]
    """

    Config: TypeAlias = EnvironmentConfig

    def __init__(self, config: EnvironmentConfig, *, task: Task.Config, seed: int = 0) -> None:
        self.config = config
        self._task_config, self._seed = task, seed

    @concurrent_endpoint
    async def setup(self) -> None:
        """Build the task. Apart from `__init__`, so that a failure comes back as an error."""
        self._turns = asyncio.Semaphore(self.config.concurrent_calls)
        self._workers = Workers(self._task_config, seed=self._seed)
        self._offers = await self._workers.start()
        self._members: dict[str, Member] = {}
        if any(offer.waits for offer in self._offers.values()):  # else it need not be built here
            task: Task = self._task_config.build(seed=self._seed)
            self._members = {name: Member(member) for name, member in task.members().items()}

    @concurrent_endpoint
    async def respond(self, requests: list[EnvironmentRequest]) -> list[EnvironmentResponse]:
        """Answer the requests, all at once and in order; the calls of one are made in order."""
        return await together(*(self._respond(request) for request in requests))

    async def _respond(self, request: EnvironmentRequest) -> EnvironmentResponse:
        offer = self._offers.get(request.task)
        response = EnvironmentResponse([], request.state, [])
        if offer is None:
            response.failure = f"no task {request.task!r}; {nearest(request.task, self._offers)}"
            response.outcomes = ["unknown"] * len(request.calls)
            response.tool_failures = [None] * len(request.calls)
            return response
        # One time for all calls of the request.
        seconds = math.inf if request.seconds is None else request.seconds
        deadline = asyncio.get_running_loop().time() + seconds
        for call in request.calls:
            result = await self._call_tool(request.task, offer, call, response.state, deadline)
            response.outcomes.append(result.outcome)
            response.tool_failures.append(result.failure)
            response.messages.append(_tool_message(call, result))
            if result.outcome == "ok":
                response.state = result.state
        if not request.calls and offer.answer != "none":
            await self._ask_task(request, offer, response, deadline)
        return response

    async def _call_tool(
        self, task: str, offer: Offer, call: ToolCall, state: dict[str, Any], deadline: float
    ) -> Result:
        if call.problem:
            return Result("malformed", shortened(call.problem, MAX_ERROR_CHARS))
        if not isinstance(call.name, str) or call.name not in offer.tools:
            name = shortened(str(call.name), MAX_NAME_CHARS)
            return Result("unknown", f"there is no tool {name!r}; {nearest(name, offer.tools)}")
        made = Call(task, call.name, state, call.arguments, max_chars=self.config.max_result_chars)
        result = await self._make(made, deadline, waits=offer.tools[call.name])
        if result.outcome == "raised" and result.failure is None:
            result.failure = ToolFailure(result.text)
        if result.outcome in ("raised", "timed_out"):
            result.text = f"{call.name} {result.text}"
        return result

    async def _ask_task(
        self,
        request: EnvironmentRequest,
        offer: Offer,
        response: EnvironmentResponse,
        deadline: float,
    ) -> None:
        call = Call(
            request.task,
            None,
            request.state,
            messages=request.messages,
            max_chars=self.config.max_result_chars,
        )
        result = await self._make(call, deadline, waits=offer.answer == "async")
        if result.outcome == "ok":
            response.messages, response.state = result.messages, result.state
        else:
            said = result.failure.said if result.failure else result.text
            response.failure = f"answer of task {request.task!r} {said}"

    async def _make(self, call: Call, deadline: float, *, waits: bool) -> Result:
        """Make a call when its turn has come, and not beyond the conversation's time."""
        late = Result("timed_out", "was out of time: the conversation may not last any longer")
        if deadline <= asyncio.get_running_loop().time():
            return late
        seconds = self.config.timeout_seconds
        try:
            async with _until(deadline) as conversation, self._turns:
                if waits:
                    return await self._make_here(call, seconds)
                return await self._workers.run(call, seconds)
        except TimeoutError:
            if conversation.expired():
                return late
            text = f"gave no answer in {seconds:g} s"
            return Result("timed_out", text, failure=ToolFailure(text))
        except ProcessEndedError as error:
            return Result("raised", str(error))
        except Exception as error:  # a state or an argument that cannot be pickled, or read again
            return Result("raised", f"could not be called or answered: it {failed(error).text}")

    async def _make_here(self, call: Call, seconds: float) -> Result:
        """Make an `async def` call on the event loop as a worker would: on a copy of the state, and
        with a result that can travel."""
        copy = pickle.loads(pickle.dumps(call))
        making = asyncio.ensure_future(make_async(self._members, copy))
        try:
            # Not `wait_for`: it would wait on for a tool that does not heed its cancellation.
            if not (await asyncio.wait({making}, timeout=seconds))[0]:
                raise TimeoutError
        finally:
            making.cancel()
        if making.cancelled():
            return Result("raised", "cancelled itself")
        return pickle.loads(packed(making.result()))


def _until(deadline: float) -> asyncio.Timeout:
    return asyncio.timeout_at(None if deadline == math.inf else deadline)


def _tool_message(call: ToolCall, result: Result) -> Message:
    message: Message = {"role": "tool"}
    if isinstance(call.name, str) and 0 < len(call.name) <= MAX_NAME_CHARS:
        message["name"] = clean(call.name)
    message["content"] = result.text if result.outcome == "ok" else f"error: {result.text}"
    return message
