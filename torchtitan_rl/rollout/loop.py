"""From prompts to rollouts: conversations of the model with its task, all taking turns together."""

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torchtitan_rl.actors.interfaces import (
    EnvironmentRequest,
    EnvironmentResponse,
    Sample,
    SampleFailure,
    SampleRequest,
)
from torchtitan_rl.config.rollout import RolloutConfig
from torchtitan_rl.config.sampling import SamplingConfig
from torchtitan_rl.core.errors import describe_error
from torchtitan_rl.core.types import Completion, Message, Outcome, Rollout, Status, Turn
from torchtitan_rl.rollout.groups import PromptGroup, RolloutGroup
from torchtitan_rl.rollout.renderer import ChatRenderer
from torchtitan_rl.tasks.tools.tool import ToolCall

SampleCall = Callable[[list[SampleRequest]], Awaitable[Sequence[Sample]]]
"""Asks the generators for a completion of each request: `Generators.sample`."""
RespondCall = Callable[[list[EnvironmentRequest]], Awaitable[Sequence[EnvironmentResponse]]]
"""Asks the environment for its response to each conversation: `Environment.respond`."""


class RolloutLoop:
    """Rolls prompt groups out, from the prompts to the end of the last conversation.

    All conversations take their turns together: their prompts enter the engine in one call, so that
    a run with the same seed decodes the same batches, whatever the tools' timing.

    Example:
        loop = RolloutLoop(prompts, sample=sample, respond=respond, renderer=chat, limits=limits)
        groups = await loop.run()
    """

    def __init__(
        self,
        prompts: Sequence[PromptGroup],
        *,
        sample: SampleCall,
        respond: RespondCall,
        renderer: ChatRenderer,
        limits: RolloutConfig,
    ) -> None:
        self.prompts = list(prompts)
        self._sample, self._respond = sample, respond
        self._conversations: list[list[_Conversation]] = []
        for prompt in prompts:
            # One object for all: a message to a generator holds it once.
            sampling, numbers = replace(prompt.sampling, n=1), range(prompt.sampling.n)
            self._conversations.append(
                [_Conversation(prompt, i, sampling, renderer, limits) for i in numbers]
            )

    async def run(self) -> list[RolloutGroup]:
        """The groups in the order of their prompts; each has all its rollouts."""
        active = [c for conversations in self._conversations for c in conversations]
        started = time.monotonic()
        for conversation in active:
            conversation.started = started
        while active:
            active = await self._respond_to(await self._sample_for(active))
        return [
            RolloutGroup(prompt, tuple(c.rollout() for c in conversations)).whole()
            for prompt, conversations in zip(self.prompts, self._conversations, strict=True)
        ]

    def given_up(self, status: Status, reason: str) -> list[RolloutGroup]:
        """The groups with what there is of their rollouts; none came to an end in time. A rollout
        that was lost before keeps its reason."""
        return [
            RolloutGroup(prompt, tuple(c.given_up(status, reason) for c in conversations))
            for prompt, conversations in zip(self.prompts, self._conversations, strict=True)
        ]

    async def _sample_for(self, active: "list[_Conversation]") -> "list[_Conversation]":
        """Give each conversation its next completion; returns those that the task responds to."""
        asked = time.monotonic()
        samples = await self._sample([c.sample_request for c in active])
        _add_wait_time(active, "generate", since=asked)
        return [
            conversation
            for conversation, sample in zip(active, samples, strict=True)
            if conversation.goes_on(conversation.on_sample, sample)
        ]

    async def _respond_to(self, active: "list[_Conversation]") -> "list[_Conversation]":
        """Give each conversation its task's response; returns those in which the model goes on."""
        if not active:
            return []
        asked = time.monotonic()
        responses = await self._respond([c.environment_request for c in active])
        _add_wait_time(active, "respond", since=asked)
        listening = []
        for conversation, response in zip(active, responses, strict=True):
            if conversation.goes_on(conversation.on_response, response):
                listening.append(conversation)
            await asyncio.sleep(0)  # rendering takes a while: let others in between
        return listening


class _Conversation:
    """Drives one rollout. What was sampled is never tokenised again, unless the chat's format wants
    all of it rendered anew: that starts a sequence of its own."""

    def __init__(
        self,
        prompt: PromptGroup,
        number: int,
        sampling: SamplingConfig,
        renderer: ChatRenderer,
        limits: RolloutConfig,
    ) -> None:
        self._prompt, self._number, self._sampling = prompt, number, sampling
        self._renderer, self._limits = renderer, limits
        self._shown = prompt.shown
        self._calls: list[ToolCall] = []
        self._turns: list[Turn] = []
        self._messages: list[Message] = list(prompt.example.messages)
        self._state: dict[str, Any] = copy.deepcopy(prompt.example.state)
        self._outcomes: list[Outcome] = []
        self._failure = ""
        self._status: Status | None = None
        """None: under way."""
        self.started = time.monotonic()
        self.seconds = dict.fromkeys(("generate", "respond", "grade"), 0.0)

    # ---- what it is at its end ----------------------------------------------------------------

    def rollout(self) -> Rollout:
        """The rollout that this conversation has become."""
        assert self._status is not None, "the conversation is under way"
        return self._so_far(self._status, self._failure)

    def given_up(self, status: Status, reason: str) -> Rollout:
        """The rollout as far as it got, that nobody goes on with."""
        if self._status is None or self._status.ended:
            return self._so_far(status, reason)
        return self._so_far(self._status, self._failure)

    def _so_far(self, status: Status, failure: str) -> Rollout:
        return Rollout(
            turns=list(self._turns),
            messages=list(self._messages),
            status=status,
            state=self._state,
            outcomes=list(self._outcomes),
            failure=failure,
            group_id=self._prompt.id,
            sample=self._number,
            seconds=dict(self.seconds),
        )

    # ---- the model's turn ---------------------------------------------------------------------

    @property
    def sample_request(self) -> SampleRequest:
        """Request for the next turn: one completion, within the limits of the conversation."""
        group, turn = self._prompt.id, len(self._turns)
        room = self._limits.max_tokens - len(self._shown.token_ids)
        fits = self._sampling.max_tokens <= room
        return SampleRequest(
            prompt_token_ids=self._shown.token_ids,
            sampling=self._sampling if fits else replace(self._sampling, max_tokens=room),
            group_id=group,
            # The first turns of a group are the samples of one name.
            seed_name=f"{group}/{self._number}/{turn}" if turn else group,
            seed_number=0 if turn else self._number,
        )

    def on_sample(self, sample: Sample) -> bool:
        """The model's turn; returns whether the task is to respond to it."""
        if isinstance(sample, SampleFailure):
            return self._end(Status(sample.kind), sample.reason)
        if not sample.token_ids or sample.finish_reason == "abort":
            return self._end(Status.EMPTY, f"nothing was sampled ({sample.finish_reason})")
        return self._on_completion(sample)

    def _on_completion(self, completion: Completion) -> bool:
        if completion.prompt_token_ids != self._shown.token_ids:
            reason = "the generator returned a completion of another prompt than it was given"
            return self._end(Status.FAILED, reason)
        if completion.token_versions is None:
            versions = [completion.policy_version] * len(completion.token_ids)
            completion = completion.with_columns(token_versions=versions)
        self._turns.append(self._shown.then(completion))
        if not self._prompt.task.interactive:
            message: Message = {"role": "assistant", "content": completion.text}
            self._calls = []
        else:
            message, self._calls = self._renderer.parse(completion.token_ids)
        self._messages.append(message)
        if completion.finish_reason == "length":
            whole = len(completion.token_ids) >= self._prompt.sampling.max_tokens
            return self._end(Status.TRUNCATED if whole else Status.TOKEN_LIMIT)
        if not self._calls and not self._prompt.task.answers:
            return self._end(Status.FINISHED)
        return len(self._turns) < self._limits.max_turns or self._end(Status.TURN_LIMIT)

    # ---- the task's turn ----------------------------------------------------------------------

    @property
    def environment_request(self) -> EnvironmentRequest:
        """The request for the environment's next response."""
        return EnvironmentRequest(
            task=self._prompt.task.name,
            messages=self._messages,
            calls=self._calls,
            state=self._state,
            seconds=max(self._seconds_left, 0.0),
        )

    def on_response(self, response: EnvironmentResponse) -> bool:
        """The task's response; returns whether the model is to go on."""
        self._state = response.state
        self._outcomes += response.outcomes
        if response.failure:
            out_of_time = self._seconds_left <= 0
            status = Status.TIME_LIMIT if out_of_time else Status.ENVIRONMENT_FAILED
            return self._end(status, response.failure)
        if not response.messages:
            return self._end(Status.FINISHED)
        said = [self._harmless(message) for message in response.messages]
        self._messages += said
        tools = self._prompt.task.shown_tools
        extended = self._renderer.extend(self._turns[-1], said, tools=tools)
        self._shown = extended or self._renderer.render(self._messages, tools=tools)
        if len(self._shown.token_ids) >= self._limits.max_tokens:
            return self._end(Status.TOKEN_LIMIT)
        return self._seconds_left > 0 or self._end(Status.TIME_LIMIT)

    def goes_on(self, turn: Callable[[Any], bool], said: Any) -> bool:
        """`on_sample` or `on_response`; one that raises is the end of this conversation and of no
        other."""
        try:
            return turn(said)
        except Exception as error:  # of a renderer, on words that nobody has foreseen
            return self._end(Status.FAILED, describe_error(error))

    def _end(self, status: Status, reason: str = "") -> bool:
        self._status, self._failure = status, reason
        return False

    def _harmless(self, message: Message) -> Message:
        return {
            key: self._renderer.harmless(value) if isinstance(value, str) else value
            for key, value in message.items()
        }

    @property
    def _seconds_left(self) -> float:
        return self._limits.max_seconds - (time.monotonic() - self.started)


def _add_wait_time(conversations: Iterable[_Conversation], phase: str, *, since: float) -> None:
    """Add the time since `since`, by the monotonic clock, to a phase of these conversations."""
    seconds = time.monotonic() - since
    for conversation in conversations:
        conversation.seconds[phase] += seconds
