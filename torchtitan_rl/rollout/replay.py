"""Rollouts that one run has saved, for the trainer of another: losses studied without a generator.

Everything up to the episodes is read as it was recorded: tokens, rewards, advantages, echo weights,
what is held out. What comes after is the new run's own business: `batch_filter`, overlong episodes,
reduction, loss, optimizer. With the same settings and the same starting model, it trains the same
weights to the bit.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from torchtitan_rl.algorithms.objective import episode_needs
from torchtitan_rl.batching.validation import require, validate
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.core.experts import Experts, expert_dtype
from torchtitan_rl.core.types import Completion, ScoredCompletion
from torchtitan_rl.models.hf import experts_of
from torchtitan_rl.observability.json_lines import read_lines
from torchtitan_rl.rollout.episodes import make_batch
from torchtitan_rl.rollout.log import file_name
from torchtitan_rl.rollout.loop import Conversation, Group
from torchtitan_rl.rollout.record import SCHEMA, read_sequence
from torchtitan_rl.rollout.renderer import ChatRenderer
from torchtitan_rl.rollout.sequences import Rendered, TokenSequence
from torchtitan_rl.tasks.task import Example, Task

TRAINED = ("train", "held out")
"""Splits of a step that its trainer has seen."""


def open_dump(
    config: RunConfig, tasks: Mapping[str, Task], renderer: ChatRenderer, hf: dict[str, Any]
) -> "RolloutDump | None":
    """The dump that a run is to train from, checked; None if it makes its own rollouts. `hf` is
    the model's config.json."""
    if not config.rollout.train_from:
        return None
    size, experts = hf["vocab_size"], experts_of(hf)
    dump = RolloutDump(config, tasks, renderer, vocab_size=size, experts=experts)
    dump.check()
    return dump


class RolloutDump:
    """The rollouts of `config.rollout.train_from`, step by step.

    Example:
        dump = RolloutDump(config, tasks, renderer, vocab_size=260, experts=None)
        dump.check()
        batch = make_batch(dump.groups(step=0), config.advantage)
    """

    def __init__(
        self,
        config: RunConfig,
        tasks: Mapping[str, Task],
        renderer: ChatRenderer,
        *,
        vocab_size: int,
        experts: Experts | None,
    ) -> None:
        self._config, self._tasks, self._renderer = config, tasks, renderer
        self._vocab_size, self._experts = vocab_size, experts
        self._folder = Path(config.rollout.train_from) / "rollouts"

    def file(self, step: int) -> Path:
        return self._folder / file_name(step)

    def check(self) -> None:
        """Refuse what cannot be trained on, as far as a look at the first step can tell."""
        missing = [step for step in range(self._config.steps) if not self.file(step).is_file()]
        if len(missing) == self._config.steps:
            raise ValueError(
                f"rollout.train_from: there are no rollouts of a run in {self._folder}: give the "
                "folder of a run (outputs/<run>) that has saved them"
            )
        if missing:
            raise ValueError(
                f"rollout.train_from: {self.file(missing[0])} is missing: set steps to "
                f"{missing[0]}, or give the folder of a longer run"
            )
        for step in range(self._config.steps):
            _check_end(self.file(step))
        episodes = make_batch(self.groups(0), self._config.advantage).episodes
        validate(episodes, vocab_size=self._vocab_size, experts=self._experts)
        needs = episode_needs(self._config)
        needs.pop("ref_logprobs", None)  # of the reference, which this run asks itself
        require(episodes, needs)

    def groups(self, step: int) -> list[Group]:
        """The groups that were trained, or held out, in a step, in the same order."""
        groups: dict[str, Group] = {}
        path = self.file(step)
        for number, record in read_lines(path):
            where = f"{path}, line {number}"
            _check_schema(record, where)
            if record.get("split") not in TRAINED:
                continue
            if record.get("task") not in self._tasks:
                raise ValueError(
                    f"{where} is of task {record.get('task')!r}; this run has "
                    f"{', '.join(self._tasks)}"
                )
            try:
                sequences = [self._sequence(one) for one in record["sequences"]]
                name = record["group"]
                group = groups[name] if name in groups else self._group(record, sequences)
                self._add(groups.setdefault(name, group), record, sequences)
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{where} is no rollout: {error!r}") from error
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
        return list(groups.values())

    def _sequence(self, record: dict[str, Any]) -> TokenSequence:
        experts = self._experts
        sequence = read_sequence(record, expert_dtype(experts.count) if experts else None)
        if (largest := max(sequence.ids)) >= self._vocab_size:
            raise ValueError(
                f"token id {largest} lies outside 0..{self._vocab_size - 1}: the model of "
                "this run has another vocabulary than that of rollout.train_from"
            )
        return sequence

    def _group(self, record: dict[str, Any], sequences: list[TokenSequence]) -> Group:
        task = self._tasks[record["task"]]
        sampling = self._config.sampling_of(task.config)
        prompt = sequences[0].ids[: sequences[0].prompt_length] if sequences else []
        return Group(
            record["group"],
            task,
            Example(record["messages"], record["expected_answer"]),
            replace(sampling, temperature=record["temperature"]),
            Rendered(prompt, None),
            recorded=True,
        )

    def _add(self, group: Group, record: dict[str, Any], sequences: list[TokenSequence]) -> None:
        conversation = Conversation(group, record["sample"], self._renderer, self._config.limits)
        conversation.samples = sequences
        conversation.heldout = record["split"] == "held out"
        rollout = conversation.rollout
        rollout.completions = list(_completions(record, sequences))
        rollout.messages, rollout.state = record["messages"], record["state"]
        rollout.status, rollout.outcomes = record["status"], record["tool_calls"]
        rollout.failure = record["failure"]
        if record["reward"] is None or record["advantage"] is None or not rollout.completions:
            raise ValueError("it was trained, but has no reward, no advantage or no tokens")
        group.conversations.append(conversation)
        group.scored.append(
            ScoredCompletion(rollout, record["reward"], record["correct"], record["reward_parts"])
        )
        group.advantages.append(record["advantage"])


def _completions(record: dict[str, Any], sequences: list[TokenSequence]) -> Iterator[Completion]:
    """One for each turn: tokens that were sampled one after the other."""
    for sequence in sequences:
        tokens = zip(sequence.sampled, sequence.ids, strict=True)
        for sampled, run in groupby(tokens, key=lambda token: token[0]):
            if sampled:
                ids = [token for _, token in run]
                yield Completion(record["policy_version"], 0, [], "", ids, None, "stop")


def _check_schema(record: dict[str, Any], where: str) -> None:
    schema = record.get("schema")
    if not isinstance(schema, int):
        raise ValueError(f"{where} has no schema: it is of a run too old to be trained from")
    if schema > SCHEMA:
        raise ValueError(
            f"{where} has schema {schema}; this version of torchtitan_rl reads up to {SCHEMA}"
        )


def _check_end(path: Path) -> None:
    """A copy, or a full disk, may have cut the file off."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 1, 0))
        if file.read() in (b"", b"\n"):
            return
        file.seek(0)
        number = sum(1 for _ in file)
    raise ValueError(f"{path}, line {number} is broken: the file was cut off")
