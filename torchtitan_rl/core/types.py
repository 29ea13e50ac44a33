"""What passes from stage to stage of a step: Completion, Rollout, ScoredCompletion, Episode."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np

Message = dict[str, Any]
"""A chat message in OpenAI's form: `role`, `content`, and `tool_calls` or a tool's `name`."""

FinishReason = Literal["stop", "length", "abort"]
Status = Literal[
    "finished", "truncated", "turn_limit", "token_limit", "time_limit", "environment_failed"
]
"""How a rollout ended: the model or its task had nothing to add; a completion was cut off at
`max_tokens`; a limit of `RolloutConfig` was reached; the task's own `answer` failed."""
Outcome = Literal["ok", "malformed", "unknown", "raised", "timed_out"]
"""What became of a tool call: `malformed` in its form or its arguments, of an `unknown` tool."""
Covers = Literal["tokens", "completion", "episode"]


@dataclass(frozen=True, slots=True)
class PerToken:
    """Declares that a field of an Episode becomes a stream with a value for each token of a
    microbatch. Slicing, packing, padding and the all-padding cell follow from this alone.

    A field that may be None is optional: all episodes of a batch have it, or none.

    Example:
        prices: Annotated[list[float] | None, PerToken("prices", "float32", 0.0, "tokens")] = None
    """

    stream: str
    """Its name in a microbatch."""
    dtype: str
    pad: int | float | bool | Literal["distinct"]
    """The value where there is none: in padding, and in the prompt if it covers the completion.
    `distinct`: 0, 1, 2, ... along the last axis."""
    covers: Covers
    """A value for each token of prompt and completion, for each of the completion, or one for all
    tokens of the episode."""
    gaps: bool = False
    """Whether an episode's values may be NaN, where a token has none."""


@dataclass(slots=True)
class Completion:
    """What the generator made of one prompt, and nothing more: no reward, no advantage, no group.

    Example:
        Completion(policy_version=3, prompt_idx=0, prompt_token_ids=[7, 8], text="4 7 [ANSWER] 11",
                   token_ids=[9, 10], token_logprobs=[-0.1, -0.7], finish_reason="stop")
    """

    policy_version: int
    """The oldest weights that sampled any of its tokens."""
    prompt_idx: int
    """Index of the prompt in the `generate` call that made this completion."""
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    token_logprobs: list[float] | None
    """log p(token) under the distribution that was sampled from, i.e. after temperature; None when
    `SamplingConfig.logprobs` is off."""
    finish_reason: FinishReason
    token_versions: list[int] | None = None
    """The weights that sampled each token; None: all by `policy_version`."""
    routed_experts: np.ndarray | None = None
    """[prompt + completion tokens, layers with experts, top_k] experts the router chose, numbered
    in uint8 (int16 beyond 256 experts); None unless `EngineConfig.return_routed_experts`."""


@dataclass(slots=True)
class Rollout:
    """One sample of a prompt from start to end: a completion for each turn of the model, and the
    conversation they make. A task without tools and answers has rollouts of one turn.

    Reward functions get it; like a Completion, it has `text` and `token_ids`.
    """

    completions: list[Completion]
    """One for each turn."""
    messages: list[Message]
    """The whole conversation, from the prompt to the model's last words."""
    status: Status
    state: dict[str, Any] = field(default_factory=dict)
    """What the task's tools have made of `Example.state`."""
    outcomes: list[Outcome] = field(default_factory=list)
    """Of its tool calls, in order."""
    failure: str = ""
    """Why the environment failed, if it did."""

    @property
    def text(self) -> str:
        """What the model said last."""
        return self.completions[-1].text

    @property
    def token_ids(self) -> list[int]:
        """All tokens that were sampled."""
        return [token for completion in self.completions for token in completion.token_ids]

    @property
    def finish_reason(self) -> FinishReason:
        """Of its last turn."""
        return self.completions[-1].finish_reason

    @property
    def policy_version(self) -> int:
        """The oldest weights that sampled any of its tokens."""
        return min(completion.policy_version for completion in self.completions)


@dataclass(slots=True)
class ScoredCompletion:
    """A sample and what the task's reward function said of it."""

    completion: Completion | Rollout
    reward: float
    correct: bool
    """Whether the task counts this as a right answer: the mean over prompts is the accuracy."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, for the log only."""


@dataclass(slots=True)
class Episode:
    """The flat sample the trainer consumes: a completion's tokens and what to learn from them.

    Flat and without inheritance, so an actor may attach metadata upstream that never gets here.
    """

    policy_version: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    token_logprobs: Annotated[
        # NaN, so that reading a token that nobody sampled is seen, never averaged in.
        list[float] | None,
        PerToken("generator_logprobs", "float32", math.nan, "completion"),
    ]
    """Generator logprobs of `token_ids`; None for demonstrations, which nobody sampled."""
    reward: float
    advantage: Annotated[float, PerToken("advantages", "float32", 0.0, "episode")]
    task: str
    group_id: str
    temperature: Annotated[float, PerToken("temperatures", "float32", 1.0, "episode")] = 1.0
    weight: Annotated[float, PerToken("weights", "float32", 0.0, "episode")] = 1.0
    """Multiplies its loss; set by the reduction."""
    token_versions: Annotated[
        list[int] | None, PerToken("token_versions", "int32", -1, "completion")
    ] = None
    """The weights that sampled each of `token_ids`, -1 where none did; None for demonstrations."""
    ref_logprobs: Annotated[
        list[float] | None, PerToken("ref_logprobs", "float32", math.nan, "completion")
    ] = None
    """Logprobs of `token_ids` under the frozen reference model, when there is one."""
    routed_experts: Annotated[
        np.ndarray | None, PerToken("routed_experts", "uint8", "distinct", "tokens")
    ] = None
    """The experts each token went to in the generator, as in `Completion`; for router replay."""
    echo_alpha: Annotated[
        list[float] | None, PerToken("echo_alpha", "float32", math.nan, "tokens", gaps=True)
    ] = None
    """Weight of a token's cross-entropy beside RL; NaN where it has none. A token with a weight, be
    it 0, is out of RL."""
    name: str = ""
    """Of its sequence: `<group>/<sample>/<number>`; for the token export."""
    loss_mask: list[bool] | None = None
    """Which tokens of prompt and completion train by RL, unless they echo; None: all of
    `token_ids`, none of the prompt."""

    @property
    def length(self) -> int:
        return len(self.prompt_token_ids) + len(self.token_ids)
