"""What several tests share: a short recipe, and what its steps pass on."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.low_tokens import LowTokens
from torchtitan_rl.actors.generator import VLLMGenerator
from torchtitan_rl.actors.trainer import Trainer
from torchtitan_rl.config import (
    CheckpointConfig,
    EchoConfig,
    EngineConfig,
    EvaluationConfig,
    OptimizerConfig,
    SamplingConfig,
    constant_lr,
)
from torchtitan_rl.core.types import Attribution, Completion, Episode, Rollout, ScoredCompletion
from torchtitan_rl.rollout.groups import PromptGroup, ScoredGroup
from torchtitan_rl.rollout.sequences import Rendered
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.tasks.task import Example


def low_tokens() -> Controller.Config:
    """A whole run in a few seconds a step, from a random model."""
    return Controller.Config(
        model="model",
        task=LowTokens.Config(),
        steps=6,
        prompts_per_step=8,
        generator=VLLMGenerator.Config(
            sampling=SamplingConfig(n=4, max_tokens=12), engine=small_engine(), threads=1
        ),
        trainer=Trainer.Config(
            optimizer=OptimizerConfig(lr=1e-3), lr_scheduler=constant_lr(warmup_steps=2), threads=1
        ),
        evaluation=EvaluationConfig(every=2, prompts=8),
        checkpoint=CheckpointConfig(every=2, keep=0),
    )


ONE_THREAD = ("--trainer.threads", "1", "--generator.threads", "1")
"""For runs that tests start: two test processes share the cores."""


def small_engine() -> EngineConfig:
    return EngineConfig(max_model_len=128, kv_cache_gib=0.1, max_num_seqs=64)


def episode(**changes: Any) -> Episode:
    """A valid episode, with what a test cares about changed."""
    fields: dict[str, Any] = {
        "policy_version": 0,
        "prompt_token_ids": [1, 2, 3],
        "token_ids": [4, 5],
        "token_logprobs": [-0.5, -1.0],
        "reward": 1.0,
        "advantage": 0.5,
        "task": "sums",
        "group_id": "sums/train/7",
    }
    return Episode(**{**fields, **changes})


USER = Attribution("user", content=True)
TOOL = Attribution("tool", content=True, tool_name="lookup")


def a_rollout(turns: Any, *, sample: int = 0, group_id: str = "", **changes: Any) -> Rollout:
    """Each turn: tokens shown (with where they come from), tokens sampled."""
    made = []
    for shown, sampled in turns:
        ids, origins = [token for token, _ in shown], [origin for _, origin in shown]
        logprobs = [-0.1 * token for token in sampled]
        completion = Completion(3, 0, ids, "", sampled, token_logprobs=logprobs)
        made.append(Rendered(ids, origins).then(completion))
    return replace(Rollout(made, [], group_id=group_id, sample=sample), **changes)


PROMPT = [(1, None), (2, USER)]
ONE_TURN = [(PROMPT, [3, 4])]
TOOL_ANSWER = [*PROMPT, (3, USER), (4, USER), (8, TOOL), (9, None)]
TWO_TURNS = [(PROMPT, [3, 4]), (TOOL_ANSWER, [5])]
"""Sampled 3 4, was told 8 (a tool's word) 9 (scaffolding), sampled 5."""


def a_prompt(
    *, n: int = 1, echo: EchoConfig | None = None, name: str = "low_tokens", number: int = 0
) -> PromptGroup:
    """A prompt of the task LowTokens."""
    task = LowTokens.Config(name=name, echo=echo).build()
    sampling = SamplingConfig(n=n, temperature=0.7)
    shown = Rendered([], None)
    return PromptGroup(f"{name}/train/{number}", task, Example([], None), sampling, shown)


def scored_group(
    *rollouts: Any, rewards: Sequence[float], lost: Sequence[Rollout] = (), **prompt: Any
) -> ScoredGroup:
    """A group of these rollouts, turn by turn; see ONE_TURN."""
    group = a_prompt(n=len(rollouts) + len(lost), **prompt)
    made = [
        turns if isinstance(turns, Rollout) else a_rollout(turns, sample=i, group_id=group.id)
        for i, turns in enumerate(rollouts)
    ]
    scored = [
        ScoredCompletion(rollout, reward, reward >= 1)
        for rollout, reward in zip(made, rewards, strict=True)
    ]
    return ScoredGroup(group, tuple(scored), tuple(lost))
