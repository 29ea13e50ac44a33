"""What passes from stage to stage of a step: Completion, ScoredCompletion, Episode."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]


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
    routed_experts: np.ndarray | None = None
    """[prompt + completion tokens, layers with experts, top_k] experts the router chose, numbered
    in uint8 (int16 beyond 256 experts); None unless `EngineConfig.return_routed_experts`."""


@dataclass(slots=True)
class ScoredCompletion:
    """A completion and what the task's reward function said of it."""

    completion: Completion
    reward: float
    correct: bool
    """Whether the task counts this as a right answer: the mean over prompts is the accuracy."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, for the log only."""


@dataclass(slots=True)
class Episode:
    """The flat sample the trainer consumes: a completion's tokens and what to learn from them.

    Flat and without inheritance, so an actor may attach metadata upstream that never gets here.
    Per-token lists are aligned with `prompt_token_ids + token_ids` unless said otherwise.
    """

    policy_version: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    token_logprobs: list[float] | None
    """Generator logprobs of `token_ids`; None for demonstrations, which nobody sampled."""
    reward: float
    advantage: float
    task: str
    group_id: str
    temperature: float = 1.0
    weight: float = 1.0
    """Multiplies its loss; set by the reduction."""
    ref_logprobs: list[float] | None = None
    """Logprobs of `token_ids` under the frozen reference model, when there is one."""
    loss_mask: list[bool] | None = None
    """Which tokens train; None means all of `token_ids` and none of the prompt."""

    @property
    def length(self) -> int:
        return len(self.prompt_token_ids) + len(self.token_ids)
