"""Every rollout of a run on disk, a file a step."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_rl.rollout import Conversation, Group


class RolloutLog:
    """Writes on a thread of its own, so that the run does not wait for the disk.

    A file is there whole or not at all, and a step that is done again replaces it.

    Example:
        outputs/<run>/rollouts/step-000012.jsonl  step-000012-evaluation.jsonl
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout-log")
        self._last: Future | None = None

    def write(self, name: str, groups: "Sequence[Group]", *, split: str = "train") -> None:
        """Save the groups' rollouts; an error of the write before this one is raised here."""
        if self._folder is None:
            return
        self._check()
        records = [record for group in groups for record in _records(group, split)]
        self._last = self._thread.submit(_write, self._folder / f"{name}.jsonl", records)

    def close(self) -> None:
        """Wait for what is under way."""
        self._thread.shutdown()
        self._check()

    def _check(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()


def _write(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
    os.replace(temporary, path)


def _records(group: "Group", split: str) -> Iterator[dict[str, Any]]:
    for number, conversation in enumerate(group.conversations):
        scored = group.scored[number]
        yield {
            "task": group.task.name,
            "group": group.id,
            "sample": conversation.number,
            "reward": scored.reward,
            "correct": scored.correct,
            "reward_parts": scored.reward_parts,
            "advantage": group.advantages[number] if group.advantages else None,
            "split": "held out" if conversation.heldout else split,
            **_conversation(conversation),
            "state": {
                column: _as_json(conversation.rollout.state.get(column))
                for column in group.task.state_columns
            },
        }


def _as_json(value: Any) -> Any:
    """A task's state may hold anything: what JSON cannot say is shown as Python does."""
    for shown in (lambda: value, lambda: repr(value)):
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            json.dumps(shown())
            return shown()
    return f"a {type(value).__name__} that cannot be shown"


def _conversation(conversation: "Conversation") -> dict[str, Any]:
    rollout = conversation.rollout
    return {
        "status": rollout.status,
        "turns": len(rollout.completions),
        "tokens": len(rollout.token_ids),
        "policy_version": rollout.policy_version,
        "failure": rollout.failure,
        "tool_calls": rollout.outcomes,
        "messages": rollout.messages,
    }
