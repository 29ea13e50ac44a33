"""Rollout replay: rollouts that one run has saved, for the trainer of another, to study losses
without a generator.

Everything up to the episodes is read as it was recorded: tokens, rewards, advantages, echo weights,
which rollouts are untrained. What comes after is the new run's own business: `batch_filter`,
overlong episodes, reduction, loss, optimizer. With the same settings and the same starting model,
it trains the same weights to the bit.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from torchtitan_rl.algorithms.objective import episode_needs
from torchtitan_rl.batching.validation import require, validate
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.core.experts import Experts, expert_dtype
from torchtitan_rl.models.hf import experts_of
from torchtitan_rl.observability.json_lines import read_lines
from torchtitan_rl.rollout.episodes import make_batch
from torchtitan_rl.rollout.log import file_name
from torchtitan_rl.rollout.record import RolloutRecord
from torchtitan_rl.rollout.record_schema import SCHEMA


def open_replay(
    config: RunConfig, tasks: Collection[str], hf: dict[str, Any]
) -> "RolloutReplay | None":
    """The saved rollouts that a run is to train from, checked; None if it makes its own. `hf` is
    the model's config.json."""
    if not config.rollout.train_from:
        return None
    size, experts = hf["vocab_size"], experts_of(hf)
    replay = RolloutReplay(config, tasks, vocab_size=size, experts=experts)
    replay.check()
    return replay


class RolloutReplay:
    """The rollouts of `config.rollout.train_from`, step by step.

    Example:
        replay = RolloutReplay(config, ["sums"], vocab_size=260, experts=None)
        replay.check()
        batch = make_batch(replay.records(step=0))
    """

    def __init__(
        self,
        config: RunConfig,
        tasks: Collection[str],
        *,
        vocab_size: int,
        experts: Experts | None,
    ) -> None:
        self._config, self._tasks = config, tasks
        self._vocab_size, self._experts = vocab_size, experts
        # Files of schema 1 do not say it.
        kind = expert_dtype(experts.count) if experts else None
        self._dtypes = {"routed_experts": str(kind)} if kind else {}
        self._folder = Path(config.rollout.train_from) / "rollouts"

    def file(self, step: int) -> Path:
        """The file of a step's rollouts."""
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
        kl = self._config.trainer.loss.has_kl
        episodes = make_batch(self.records(0), keep_zero_advantages=kl).episodes
        validate(episodes, vocab_size=self._vocab_size, experts=self._experts)
        needs = episode_needs(self._config.trainer)
        needs.pop("ref_logprobs", None)  # of the reference, which this run asks itself
        require(episodes, needs)

    def records(self, step: int) -> list[RolloutRecord]:
        """The rollouts that were trained on in a step, or measured, in the same order."""
        records = []
        path = self.file(step)
        for number, line in read_lines(path):
            where = f"{path}, line {number}"
            _check_schema(line, where)
            if line.get("split") not in ("train", "untrained", "held out"):
                continue
            if line.get("task") not in self._tasks:
                raise ValueError(
                    f"{where} is of task {line.get('task')!r}; this run has "
                    f"{', '.join(self._tasks)}"
                )
            try:
                record = RolloutRecord.from_json(line, self._dtypes)
                self._check(record)
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{where} is no rollout: {error!r}") from error
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            records.append(record)
        return records

    def _check(self, record: RolloutRecord) -> None:
        if record.reward is None or record.advantage is None or not record.tokens:
            raise ValueError("it was trained, but has no reward, no advantage or no tokens")
        for sequence in record.sequences:
            largest = max(sequence.prompt_token_ids + sequence.token_ids)
            if largest >= self._vocab_size:
                raise ValueError(
                    f"token id {largest} lies outside 0..{self._vocab_size - 1}: the model of "
                    "this run has another vocabulary than that of rollout.train_from"
                )


def _check_schema(record: dict[str, Any], where: str) -> None:
    schema = record.get("schema")
    if not isinstance(schema, int):
        raise ValueError(f"{where} has no schema: it is of a run too old to be trained from")
    if schema > SCHEMA:
        raise ValueError(
            f"{where} has schema {schema}; this version of torchtitan_rl reads up to {SCHEMA}"
        )


def _check_end(path: Path) -> None:
    """Refuse a file that a copy, or a full disk, has cut off."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 1, 0))
        if file.read() in (b"", b"\n"):
            return
        file.seek(0)
        number = sum(1 for _ in file)
    raise ValueError(f"{path}, line {number} is broken: the file was cut off")
