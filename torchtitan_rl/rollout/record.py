"""The record of a rollout: one value for memory, disk, the page and training from a saved run.

A step makes a record of every rollout; metrics, failures, the rollout log and the episodes are
functions of records, be they of this run or read from the files of another.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np

from torchtitan_rl.core.columns import COLUMNS, checked, columns_of, undeclared
from torchtitan_rl.core.types import Outcome, Rollout, ScoredCompletion, Status
from torchtitan_rl.rollout.groups import PromptGroup, ScoredGroup
from torchtitan_rl.rollout.record_schema import SCHEMA, upgraded
from torchtitan_rl.rollout.sequences import TokenSequence, merge_turns

Split = Literal["train", "untrained", "evaluation", "discarded"]
"""Purpose of a rollout: it trains; it is measured and never trained on; it is greedy, of a
held-out prompt; or it is discarded, and `failure` says why: it was lost, or its group is not
needed."""
FailureKind = Literal["failed", "empty", "timed_out", "cancelled", "not_useful"]
"""Why a rollout was discarded: as `Status` says, or dynamic sampling had no use for its group."""


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """Everything that is known of one rollout, from its prompt to what it trains."""

    split: Split
    task: str
    group: str
    """The id of the prompt group."""
    sample: int
    """The number of the rollout in its group."""
    reward: float | None
    """None, as `correct`, if the rollout was not graded."""
    correct: bool | None
    reward_parts: dict[str, float]
    advantage: float | None
    """None if the rollout does not train."""
    status: Status
    failure: str
    """Why the rollout was lost or discarded, or why its environment failed."""
    turns: int
    """Turns of the model."""
    tokens: int
    """Tokens that the model sampled."""
    tool_calls: list[Outcome]
    """The outcome of each tool call, in order."""
    policy_version: int | None
    """The oldest policy version that sampled any of the tokens."""
    newest_version: int | None
    """The newest policy version that sampled any of the tokens."""
    temperature: float
    seconds: dict[str, float]
    """Seconds in each phase."""
    messages: list[dict[str, Any]]
    expected_answer: Any
    state: dict[str, Any]
    """The entries of the state that the task names in `state_columns`."""
    sequences: list[TokenSequence] = field(default_factory=list)
    """The token sequences to train on, with everything that is known of each token."""
    unattributed: int = 0
    """Turns that do not echo, because the renderer could not say where their tokens come from."""

    @classmethod
    def of(
        cls,
        prompt: PromptGroup,
        rollout: Rollout,
        *,
        split: Split,
        scored: ScoredCompletion | None = None,
        advantage: float | None = None,
        sequences: list[TokenSequence] | None = None,
        unattributed: int = 0,
    ) -> "RolloutRecord":
        """The record of a rollout; without `sequences`, nothing of it echoes."""
        versions = [
            version
            for completion in rollout.completions
            for version in (completion.policy_version, *(completion.token_versions or ()))
        ]
        return cls(
            split=split,
            task=prompt.task.name,
            group=prompt.id,
            sample=rollout.sample,
            reward=scored.reward if scored else None,
            correct=scored.correct if scored else None,
            reward_parts=scored.reward_parts if scored else {},
            advantage=advantage,
            status=rollout.status,
            failure=rollout.failure,
            turns=len(rollout.turns),
            tokens=sum(len(turn.token_ids) for turn in rollout.turns),
            tool_calls=rollout.outcomes,
            policy_version=min(versions, default=None),
            newest_version=max(versions, default=None),
            temperature=prompt.sampling.temperature,
            seconds=rollout.seconds,
            messages=rollout.messages,
            expected_answer=prompt.example.expected_answer,
            state={name: rollout.state.get(name) for name in prompt.task.state_columns},
            sequences=merge_turns(rollout.turns) if sequences is None else sequences,
            unattributed=unattributed,
        )

    @property
    def failure_kind(self) -> FailureKind | None:
        """Why the rollout was discarded, if it was."""
        if self.split != "discarded":
            return None
        return "not_useful" if self.status.ended else self.status.value  # type: ignore[return-value]

    def discarded(self, reason: str, status: Status | None = None) -> "RolloutRecord":
        """The record of a rollout that is not trained on; without a `status` it has ended like any
        other. One that was lost before keeps its reason."""
        if self.split == "discarded":
            return self
        ended = self.status if status is None else status
        return replace(self, split="discarded", advantage=None, failure=reason, status=ended)

    def to_json(self, step: int) -> dict[str, Any]:
        """The object that stands for the rollout in the files of a step; `from_json` reads it."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values["sequences"] = [sequence_to_json(sequence) for sequence in self.sequences]
        return {"schema": SCHEMA, "step": step, **values}

    @classmethod
    def from_json(
        cls, record: dict[str, Any], dtypes: Mapping[str, str] | None = None
    ) -> "RolloutRecord":
        """The record that `to_json` was given, also of an older schema. `dtypes` of array columns
        are those that a file does not say."""
        record = upgraded(record)
        names = {each.name for each in fields(cls)}
        values = {name: value for name, value in record.items() if name in names}
        values["status"] = Status(record["status"])
        values["sequences"] = [sequence_from_json(one, dtypes) for one in record["sequences"]]
        return cls(**values)


def lost_records(prompt: PromptGroup, lost: Iterable[Rollout]) -> list[RolloutRecord]:
    """The records of lost rollouts."""
    return [RolloutRecord.of(prompt, rollout, split="discarded") for rollout in lost]


def evaluation_records(group: ScoredGroup) -> list[RolloutRecord]:
    """The records of greedy rollouts of a held-out prompt: nothing trains, nothing echoes."""
    scored = [
        RolloutRecord.of(group.prompt, rollout_of(one), split="evaluation", scored=one)
        for one in group.scored
    ]
    return scored + lost_records(group.prompt, group.lost)


def rollout_of(scored: ScoredCompletion) -> Rollout:
    assert isinstance(scored.completion, Rollout), "groups of a run hold rollouts"
    return scored.completion


def sequence_to_json(sequence: TokenSequence) -> dict[str, Any]:
    """A sequence to train on; a column that it does not have is left out, as is a loss mask that
    only says that all of the completion was sampled.

    Example:
        {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "token_logprobs": [-0.1, -0.7],
         "token_versions": [5, 5]}
    """
    prompt, completion = sequence.prompt_token_ids, sequence.token_ids
    record: dict[str, Any] = {"prompt_token_ids": prompt, "token_ids": completion}
    dtypes = {}
    for column, values in columns_of(sequence.columns):
        if column.name == "loss_mask" and values == _whole_mask(prompt, completion):
            continue
        record[column.name] = column.to_json(values)
        if isinstance(values, np.ndarray) and values.dtype.name != column.dtype:
            dtypes[column.name] = values.dtype.name
    return {**record, "dtypes": dtypes} if dtypes else record


def sequence_from_json(
    record: dict[str, Any], dtypes: Mapping[str, str] | None = None
) -> TokenSequence:
    """The sequence that `sequence_to_json` was given."""
    prompt, completion = record["prompt_token_ids"], record["token_ids"]
    columns: dict[str, Any] = {"loss_mask": _whole_mask(prompt, completion)}
    kinds = {**(dtypes or {}), **record.get("dtypes", {})}
    for name, values in record.items():
        if name in ("prompt_token_ids", "token_ids", "dtypes") or values is None:
            continue
        if name not in COLUMNS:
            raise ValueError(undeclared(name))
        columns[name] = COLUMNS[name].from_json(values, kinds.get(name, ""))
    return TokenSequence(prompt, completion, checked(columns))


def _whole_mask(prompt: list[int], completion: list[int]) -> list[bool]:
    return [False] * len(prompt) + [True] * len(completion)
