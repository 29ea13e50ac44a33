"""The values that pass from stage to stage: Completion, Rollout, ScoredCompletion, Episode.

Each stage takes a value and returns a new one; no stage changes what an earlier one has made.
"""

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, Self

import numpy as np

from torchtitan_rl.core.columns import COLUMNS, checked

Message = dict[str, Any]
"""A chat message in OpenAI's form: `role`, `content`, and `tool_calls` or a tool's `name`."""

Prompt = str | list[int]
"""Text, or the ids of its tokens."""

FinishReason = Literal["stop", "length", "abort"]
Outcome = Literal["ok", "malformed", "unknown", "raised", "timed_out"]
"""Outcome of a tool call: `malformed` in its form or its arguments, of an `unknown` tool."""
Role = Literal["system", "user", "assistant", "tool"]


class Status(StrEnum):
    """How a rollout ended. With the first six its conversation has ended, and is graded. With the
    others the rollout is lost: it is not graded."""

    FINISHED = "finished"
    """The model, or its task, had nothing to add."""
    TRUNCATED = "truncated"
    """A completion was cut off at `max_tokens`."""
    TURN_LIMIT = "turn_limit"
    """The model had as many turns as `rollout.max_turns` allows."""
    TOKEN_LIMIT = "token_limit"
    """The conversation has as many tokens as `rollout.max_tokens` allows."""
    TIME_LIMIT = "time_limit"
    """The conversation has lasted as long as `rollout.max_seconds` allows."""
    ENVIRONMENT_FAILED = "environment_failed"
    """The task's own `answer` failed."""
    FAILED = "failed"
    """A generator, a reward function or a renderer failed, or another sample of a group that is
    scored as a whole."""
    EMPTY = "empty"
    """The generator sampled nothing."""
    TIMED_OUT = "timed_out"
    """The group took longer than `rollout.timeout_seconds`."""
    CANCELLED = "cancelled"
    """The step had enough groups without it, or the run ended."""

    @property
    def ended(self) -> bool:
        """Whether the conversation came to an end, and is graded."""
        return self not in _LOST


_LOST = frozenset({Status.FAILED, Status.EMPTY, Status.TIMED_OUT, Status.CANCELLED})
ENDS: tuple[Status, ...] = tuple(status for status in Status if status.ended)
"""The ways in which a conversation ends, in the order of the metrics."""


class WithColumns:
    """Tokens with columns: whatever is known of each token, by the name of its declaration.

    A column is read as an attribute, and is None where it is absent.
    """

    __slots__ = ()
    prompt_token_ids: list[int]
    token_ids: list[int]
    columns: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        # Only for names that are no attribute: columns that somebody else has declared.
        if name in COLUMNS:
            return self.columns.get(name)
        raise AttributeError(f"{type(self).__name__!r} has no attribute and no column {name!r}")

    def with_columns(self, **columns: Any) -> Self:
        """A copy with these columns in place of its own; None leaves a column out.

        Example:
            episode.with_columns(ref_logprobs=[-0.1, -0.7])
        """
        return replace(self, columns={**self.columns, **columns})  # type: ignore[type-var]

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def token_logprobs(self) -> list[float] | None:
        """log p(token) of each of `token_ids` under the distribution that was sampled from, i.e.
        after temperature; None when `SamplingConfig.logprobs` is off, and for demonstrations."""
        return self.columns.get("token_logprobs")

    @property
    def token_versions(self) -> list[int] | None:
        """The weights that sampled each of `token_ids`, -1 where none did; None in a Completion:
        all by `policy_version`; in an Episode: a demonstration, which nobody sampled."""
        return self.columns.get("token_versions")

    @property
    def routed_experts(self) -> np.ndarray | None:
        """[prompt + completion tokens, layers with experts, top_k] experts the router chose,
        numbered in uint8 (int16 beyond 256 experts); None unless
        `EngineConfig.return_routed_experts`."""
        return self.columns.get("routed_experts")


@dataclass(slots=True, init=False)
class Completion(WithColumns):
    """What a generator sampled for one prompt, in one turn: no reward, no advantage, no group.

    Example:
        Completion(policy_version=3, prompt_idx=0, prompt_token_ids=[7, 8], text="4 7 [ANSWER] 11",
                   token_ids=[9, 10], token_logprobs=[-0.1, -0.7], finish_reason="stop")
    """

    policy_version: int
    """The oldest policy version that sampled any of the tokens."""
    prompt_idx: int
    """Index of the prompt in the `generate` call that made this completion."""
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    columns: dict[str, Any]
    """Per-token data of the generator, by column. Any declared column may also be given as a
    keyword. A column that is None is left out."""

    def __init__(
        self,
        policy_version: int,
        prompt_idx: int,
        prompt_token_ids: list[int],
        text: str,
        token_ids: list[int],
        *,
        finish_reason: FinishReason = "stop",
        columns: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self.policy_version, self.prompt_idx = policy_version, prompt_idx
        self.prompt_token_ids, self.text, self.token_ids = prompt_token_ids, text, token_ids
        self.finish_reason = finish_reason
        self.columns = checked({**(columns or {}), **more})


@dataclass(frozen=True, slots=True)
class Attribution:
    """Origin of a token in a conversation, from the renderer."""

    role: Role
    content: bool
    """Whether the token belongs to the message's content, not to the chat format."""
    tool_name: str | None = None
    """Name of the tool whose result the token belongs to."""
    sampled: bool = False
    """Whether the model sampled the token in this turn."""


SAMPLED = Attribution("assistant", content=True, sampled=True)
"""The attribution of every token that the model sampled."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model in a conversation: what the generator was shown and what it sampled.

    Sampled tokens are never tokenised again: the prompt of the next turn holds them as they were.
    """

    completion: Completion
    attributions: list[Attribution | None] | None = None
    """Where each token of prompt and completion comes from; None when the renderer cannot say."""

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.completion.prompt_token_ids

    @property
    def token_ids(self) -> list[int]:
        return self.completion.token_ids

    @property
    def length(self) -> int:
        return self.completion.length


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sample of a prompt from start to end: the turns of the model, and the conversation they
    make. A task without tools and answers has rollouts of one turn.

    Reward functions get a Rollout; like a Completion, it has `text` and `token_ids`.
    """

    turns: list[Turn]
    """The model's turns; completions may be given in their place."""
    messages: list[Message]
    """The whole conversation, from the prompt to the model's last message."""
    status: Status = Status.FINISHED
    """How the rollout ended."""
    state: dict[str, Any] = field(default_factory=dict)
    """The state of the conversation: `Example.state`, as the task's tools have changed it."""
    outcomes: list[Outcome] = field(default_factory=list)
    """The outcome of each tool call, in order."""
    failure: str = ""
    """Why the rollout was lost, or why the environment failed, if one did."""
    group_id: str = ""
    """The prompt group that the rollout belongs to."""
    sample: int = 0
    """The number of the rollout in its group."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds in each phase: generate, respond, grade. Conversations that share a call share its
    time."""

    def __post_init__(self) -> None:
        turns = [turn if isinstance(turn, Turn) else Turn(turn) for turn in self.turns]
        object.__setattr__(self, "turns", turns)
        object.__setattr__(self, "status", Status(self.status))

    @property
    def completions(self) -> list[Completion]:
        """The completion of each turn."""
        return [turn.completion for turn in self.turns]

    @property
    def text(self) -> str:
        """The text of the last turn."""
        return self.turns[-1].completion.text

    @property
    def token_ids(self) -> list[int]:
        """All tokens that were sampled."""
        return [token for turn in self.turns for token in turn.token_ids]

    @property
    def finish_reason(self) -> FinishReason:
        """The finish reason of the last turn."""
        return self.turns[-1].completion.finish_reason

    @property
    def policy_version(self) -> int:
        """The oldest policy version that sampled any of the tokens."""
        return min(turn.completion.policy_version for turn in self.turns)

    def failed(self, status: Status, reason: str) -> "Rollout":
        """The rollout as a lost one, with its status and the reason."""
        return replace(self, status=status, failure=reason)


@dataclass(frozen=True, slots=True)
class ScoredCompletion:
    """A sample and what the task's reward function returned for it."""

    completion: Completion | Rollout
    reward: float
    correct: bool
    """Whether the task counts the sample as correct: the mean of this is the accuracy."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, for the log only."""


@dataclass(slots=True, init=False)
class Episode(WithColumns):
    """One flat sequence that the trainer learns from: tokens, and in columns what they train.

    An episode contains no rollout: what else is known of one never reaches the trainer.
    """

    policy_version: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    reward: float
    task: str
    group_id: str
    name: str
    """Name of the sequence, `<group>/<sample>/<number>`, for the token export."""
    columns: dict[str, Any]
    """Per-token data, by column. Each column may also be given as a keyword. A column that is None
    is left out. The advantage must be given."""

    def __init__(
        self,
        policy_version: int,
        prompt_token_ids: list[int],
        token_ids: list[int],
        *,
        reward: float,
        task: str,
        group_id: str,
        name: str = "",
        columns: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self.policy_version = policy_version
        self.prompt_token_ids, self.token_ids = prompt_token_ids, token_ids
        self.reward, self.task, self.group_id, self.name = reward, task, group_id, name
        self.columns = checked({"temperature": 1.0, "weight": 1.0, **(columns or {}), **more})
        if "advantage" not in self.columns:  # the one column without a default
            raise TypeError("an Episode needs an advantage")

    @property
    def advantage(self) -> float:
        """The advantage of all tokens that train by RL."""
        return self.columns["advantage"]

    @property
    def temperature(self) -> float:
        """The temperature that the tokens were sampled with."""
        return self.columns["temperature"]

    @property
    def weight(self) -> float:
        """Factor of the loss of all tokens; set by the reduction."""
        return self.columns["weight"]

    @property
    def ref_logprobs(self) -> list[float] | None:
        """Logprobs of `token_ids` under the frozen reference model, when there is one."""
        return self.columns.get("ref_logprobs")

    @property
    def echo_alpha(self) -> list[float] | None:
        """Weight of each token's cross-entropy; NaN where a token does not echo. A token with a
        weight, even 0, does not train by RL."""
        return self.columns.get("echo_alpha")

    @property
    def echoes(self) -> bool:
        """Whether any token trains by cross-entropy."""
        return not all(map(math.isnan, self.echo_alpha or ()))

    @property
    def loss_mask(self) -> list[bool] | None:
        """Which tokens of prompt and completion train by RL, unless they echo; None: all of
        `token_ids`, none of the prompt."""
        return self.columns.get("loss_mask")
