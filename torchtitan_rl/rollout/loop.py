"""From prompts to rollouts: conversations of the model with its task, all taking turns together."""

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan_rl.actors.environment import Request, Response
from torchtitan_rl.actors.grader import RewardError, Ungraded, pair
from torchtitan_rl.config.rollout import RolloutConfig
from torchtitan_rl.config.sampling import SamplingConfig
from torchtitan_rl.core.types import Completion, Message, Rollout, ScoredCompletion, Status
from torchtitan_rl.rollout.renderer import ChatRenderer
from torchtitan_rl.rollout.sequences import Rendered, TokenSequence, Turn
from torchtitan_rl.tasks.task import Example, Reward, Task
from torchtitan_rl.tasks.tools.tool import ToolCall

SampleCall = Callable[
    [list[list[int]], list[SamplingConfig], list[str], list[str]], Awaitable[list[Completion]]
]
"""Prompts, how to sample each, the names their seeds derive from, and their groups:
`Generators.sample`."""
RespondCall = Callable[[list[Request]], Awaitable[list[Response]]]
"""`Environment.respond`."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Rollouts that came to nothing."""

    task: str
    group: str
    kind: str
    """`failed`, `timed_out`, `empty`, `dropped` (not useful) or `cancelled`."""
    reason: str
    rollouts: int
    partial: bool = False
    """Whether others of its group survive."""


@dataclass(slots=True)
class Group:
    """The samples of one prompt. Its id is unique in the run."""

    id: str
    task: Task
    example: Example
    sampling: SamplingConfig
    shown: Rendered
    """The prompt."""
    conversations: list["Conversation"] = field(default_factory=list)
    scored: list[ScoredCompletion] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    buried: list["Conversation"] = field(default_factory=list)
    """Conversations that came to nothing, or are not trained; each says why."""
    recorded: bool = False
    """Read from a dump, with advantages, sequences and what is held out as they were."""

    def fail(self, kind: str, reason: str, rollouts: int | None = None) -> Failure:
        """Note that so many of its rollouts, or all that are left, came to nothing."""
        count = self.left if rollouts is None else rollouts
        partial = rollouts is not None and bool(self.conversations)
        failure = Failure(self.task.name, self.id, kind, reason, count, partial)
        self.failures.append(failure)
        return failure

    @property
    def left(self) -> int:
        """Rollouts that have not come to nothing."""
        return self.sampling.n - sum(failure.rollouts for failure in self.failures)

    @property
    def ungraded(self) -> Ungraded:
        """What the grader gets to see."""
        rollouts = [conversation.rollout for conversation in self.conversations]
        return Ungraded(rollouts, self.example.expected_answer, self.id, self.task.name)

    def bury(self) -> None:
        """Go on with the conversations that came to an end; if the task scores a group as a whole,
        with all or none."""
        dead = [c for c in self.conversations if c.failed]
        self.conversations = [c for c in self.conversations if not c.failed]
        self.buried += dead
        if dead and self.task.group_scoring and self.conversations:
            rest, reason = len(self.conversations), "another sample of its group failed"
            self.bury_all("failed", reason)
            self.fail("failed", reason, rest)
        for conversation in dead:
            assert conversation.failed is not None
            kind, reason = conversation.failed
            self.fail(kind, reason, rollouts=1)

    def bury_all(self, kind: str, reason: str) -> None:
        """None of its conversations is trained."""
        for conversation in self.conversations:
            conversation.failed = (kind, reason)
        self.buried += self.conversations
        self.conversations = []

    def give_up(self, kind: str, reason: str) -> None:
        """It ended without being trained."""
        if self.left > 0:  # else it has said why itself
            self.fail(kind, reason)
        self.bury_all(kind, reason)


class Conversation:
    """One rollout under way. What was sampled is never tokenised again, unless the chat's format
    wants all of it rendered anew: that starts a sample of its own."""

    def __init__(
        self,
        group: Group,
        number: int,
        renderer: ChatRenderer,
        limits: RolloutConfig,
        *,
        started: float | None = None,
    ) -> None:
        # Not the group itself: without a cycle, a batch is gone as soon as nobody needs it.
        self.group_id, self.number = group.id, number
        self.task, self._sampling = group.task, group.sampling
        self.renderer, self.limits = renderer, limits
        self.tools = group.task.shown_tools
        self.shown = group.shown
        self.turns: list[Turn] = []
        self.calls: list[ToolCall] = []
        self.started = time.monotonic() if started is None else started
        self.heldout = False
        self.failed: tuple[str, str] | None = None
        """Kind and reason, if it came to nothing."""
        self.samples: list[TokenSequence] | None = None
        """Its sequences to train on, with their echo weights."""
        self.seconds = dict.fromkeys(("generate", "respond", "grade"), 0.0)
        """How long it waited for each; conversations that share a call share its time."""
        self.rollout = Rollout(
            completions=[],
            messages=list(group.example.messages),
            status="finished",
            state=copy.deepcopy(group.example.state),
        )

    @property
    def id(self) -> str:
        """Of its next turn: what the seed of that derives from."""
        return f"{self.group_id}/{self.number}/{len(self.turns)}"

    @property
    def sampling(self) -> SamplingConfig:
        """Of its next turn: one completion, that fits what is left of the conversation."""
        return replace(fitted(self._sampling, self.shown, self.limits), n=1)

    def take(self, completion: Completion) -> bool:
        """The model's turn; returns whether the task is to respond to it."""
        if not completion.token_ids or completion.finish_reason == "abort":
            # Of a call that failed, the generators say why in the place of its words.
            reason = completion.text or f"nothing was sampled ({completion.finish_reason})"
            self.failed = ("failed" if completion.text else "empty", reason)
            return False
        self.turns.append(
            Turn.after(
                self.shown,
                completion.token_ids,
                completion.token_logprobs,
                completion.routed_experts,
                completion.token_versions
                or [completion.policy_version] * len(completion.token_ids),
            )
        )
        self.rollout.completions.append(completion)
        if not self.task.interactive:
            message: Message = {"role": "assistant", "content": completion.text}
            self.calls = []
        else:
            message, self.calls = self.renderer.parse(completion.token_ids)
        self.rollout.messages.append(message)
        if completion.finish_reason == "length":
            whole = len(completion.token_ids) >= self._sampling.max_tokens
            return self._end("truncated" if whole else "token_limit")
        if not self.calls and not self.task.answers:
            return self._end("finished")
        return len(self.turns) < self.limits.max_turns or self._end("turn_limit")

    @property
    def request(self) -> Request:
        """What the environment is to respond to."""
        return Request(
            task=self.task.name,
            messages=self.rollout.messages,
            calls=self.calls,
            state=self.rollout.state,
            seconds=max(self._seconds_left, 0.0),
        )

    def hear(self, response: Response) -> bool:
        """The task's response; returns whether the model is to go on."""
        rollout = self.rollout
        rollout.state = response.state
        rollout.outcomes += response.outcomes
        if response.failure:
            rollout.failure = response.failure
            return self._end("environment_failed" if self._seconds_left > 0 else "time_limit")
        if not response.messages:
            return self._end("finished")
        said = [self._harmless(message) for message in response.messages]
        rollout.messages += said
        self.shown = self.renderer.extend(
            self.turns[-1], said, tools=self.tools
        ) or self.renderer.render(rollout.messages, tools=self.tools)
        if len(self.shown.token_ids) >= self.limits.max_tokens:
            return self._end("token_limit")
        return self._seconds_left > 0 or self._end("time_limit")

    def goes_on(self, turn: Callable[[Any], bool], said: Any) -> bool:
        """`take` or `hear`; one that raises is the end of this conversation and of no other."""
        try:
            return turn(said)
        except Exception as error:  # of a renderer, on words that nobody has foreseen
            self.failed = ("failed", f"{type(error).__name__}: {error}")
            return False

    def _harmless(self, message: Message) -> Message:
        return {
            key: self.renderer.harmless(value) if isinstance(value, str) else value
            for key, value in message.items()
        }

    @property
    def _seconds_left(self) -> float:
        return self.limits.max_seconds - (time.monotonic() - self.started)

    def _end(self, status: Status) -> bool:
        self.rollout.status = status
        return False


def fitted(sampling: SamplingConfig, shown: Rendered, limits: RolloutConfig) -> SamplingConfig:
    """No more tokens than what is shown leaves of a conversation."""
    room = limits.max_tokens - len(shown.token_ids)
    return replace(sampling, max_tokens=min(sampling.max_tokens, room))


def all_scored(groups: Sequence[Group]) -> list[tuple[str, ScoredCompletion]]:
    """Every sample with the name of its task."""
    return [(group.task.name, scored) for group in groups for scored in group.scored]


def take_rewards(groups: Sequence[Group], given: Sequence[list[Reward] | RewardError]) -> None:
    """What the grader said of each group. One whose reward function failed is lost; if that is all
    of them, it is no accident."""
    for group, rewards in zip(groups, given, strict=True):
        if isinstance(rewards, RewardError):
            group.bury_all("failed", str(rewards))
            group.fail("failed", str(rewards))
        else:
            group.scored = pair([c.rollout for c in group.conversations], rewards)
    if groups and not any(group.scored for group in groups):
        raise next(error for error in given if isinstance(error, RewardError))


def waited(conversations: Iterable[Conversation], phase: str, *, since: float) -> None:
    """They have waited since that time, by the monotonic clock."""
    seconds = time.monotonic() - since
    for conversation in conversations:
        conversation.seconds[phase] += seconds


async def roll_out(
    groups: Sequence[Group],
    *,
    sample: SampleCall,
    respond: RespondCall,
    renderer: ChatRenderer,
    limits: RolloutConfig,
) -> None:
    """Give each group its conversations, from the prompt to the end of the last.

    All conversations take their turns together: their prompts enter the engine in one call, so that
    a run with the same seed decodes the same batches, whatever the tools' timing.
    """
    started = time.monotonic()
    for group in groups:
        group.conversations, group.scored, group.failures, group.buried = [], [], [], []
    first = await sample(
        [group.shown.token_ids for group in groups],
        [fitted(group.sampling, group.shown, limits) for group in groups],
        [group.id for group in groups],
        [group.id for group in groups],
    )
    generated = time.monotonic() - started
    talking = []
    for completion in first:
        group = groups[completion.prompt_idx]
        number = len(group.conversations)
        conversation = Conversation(group, number, renderer, limits, started=started)
        conversation.seconds["generate"] = generated
        group.conversations.append(conversation)
        if conversation.goes_on(conversation.take, completion):
            talking.append(conversation)
    while talking:
        asked = time.monotonic()
        responses = await respond([c.request for c in talking])
        waited(talking, "respond", since=asked)
        listening = []
        for conversation, response in zip(talking, responses, strict=True):
            if conversation.goes_on(conversation.hear, response):
                listening.append(conversation)
            await asyncio.sleep(0)  # rendering takes a while: let others in between
        if not listening:
            break
        asked = time.monotonic()
        completions = await sample(
            [c.shown.token_ids for c in listening],
            [c.sampling for c in listening],
            [c.id for c in listening],
            [c.group_id for c in listening],
        )
        waited(listening, "generate", since=asked)
        talking = [
            conversation
            for conversation, completion in zip(listening, completions, strict=True)
            if conversation.goes_on(conversation.take, completion)
        ]
    for group in groups:
        group.bury()
