"""Lost rollouts: logged one by one, counted, and reported once per reason."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchtitan_rl.observability.console import console
from torchtitan_rl.observability.run_folder import RunFolder
from torchtitan_rl.rollout.record import FailureKind, RolloutRecord

LONGEST_REASON = 400
"""Characters of a reason on the console; the log has all of it."""


CHOSEN = ("not_useful", "cancelled")
"""Kinds of failures that are none: dynamic sampling and oversampling leave groups out."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Rollouts of a group that were lost for one reason."""

    task: str
    group: str
    kind: FailureKind
    reason: str
    rollouts: int
    partial: bool = False
    """Whether other rollouts of its group did not fail."""


def failures_of(records: Iterable[RolloutRecord]) -> list[Failure]:
    """Every lost rollout, in exactly one failure; by group, then reason."""
    groups: defaultdict[str, list[RolloutRecord]] = defaultdict(list)
    for record in records:
        groups[record.group].append(record)
    found = []
    for name, its in groups.items():
        reasons: defaultdict[tuple[FailureKind, str], int] = defaultdict(int)
        for record in its:
            if kind := record.failure_kind:
                reasons[kind, record.failure] += 1
        failed = sum(count for (kind, _), count in reasons.items() if kind not in CHOSEN)
        found += [
            Failure(its[0].task, name, kind, reason, count, partial=failed < len(its))
            for (kind, reason), count in reasons.items()
        ]
    return found


class FailureReporter:
    """Logs failures, and warns of a reason once: later steps only count, at the end of their line.

    Example:
        reporter = FailureReporter(folder)
        failures = reporter.of_step(3, records)
        failure_metrics(failures, ["sums"])  # {"rollouts/failed/all": 4.0, ...}
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._reported: set[tuple[str, str]] = set()

    def of_step(self, step: int, records: Sequence[RolloutRecord]) -> list[Failure]:
        """The failures since the last step."""
        failures = self._log(step, records)
        if failed := [failure for failure in failures if failure.kind not in CHOSEN]:
            rollouts = sum(failure.rollouts for failure in failed)
            names = {failure.group for failure in failed}
            whose = f"{len(names)} groups" if len(names) > 1 else f"group {failed[0].group}"
            what = f"{rollouts} rollout{'s' * (rollouts > 1)} of {whose} failed"
            self._warn("step", what, failed)
        return failures

    def of_evaluation(self, step: int, records: Sequence[RolloutRecord]) -> dict[str, float]:
        """How many held-out prompts have no part in the evaluation, if any."""
        failed = self._log(step, records)
        if not failed:
            return {}
        prompts = len({record.group for record in records})
        self._warn("evaluation", f"{len(failed)} of {prompts} held-out prompts failed", failed)
        return {"rollouts/failed/evaluation": len(failed)}

    def _log(self, step: int, records: Sequence[RolloutRecord]) -> list[Failure]:
        failures = failures_of(records)
        self._folder.log_failures(step, failures)
        return failures

    def _warn(self, where: str, what: str, failures: Sequence[Failure]) -> None:
        """Print one line with the first reason that is new there; none if they are all known.
        Another new one is printed when it comes again."""
        reasons: dict[tuple[str, str], str] = {}
        for failure in failures:
            reasons.setdefault((where, likeness(failure)), failure.reason)
        new = next((like for like in reasons if like not in self._reported), None)
        if new is None:
            return
        self._reported.add(new)
        reason = " ".join(reasons[new].split())
        if len(reason) > LONGEST_REASON:
            reason = f"{reason[:LONGEST_REASON]} …"
        more = len(reasons) - 1
        others = f" (and {more} other reason{'s' * (more > 1)})" if more else ""
        log = f"{self._folder.relative}/logs/failures.jsonl"
        console.print(f"warning: {what}: {reason}{others}; all are in {log}", markup=False)


def likeness(failure: Failure) -> str:
    """The reason of a failure without what differs from group to group: its name, and numbers.

    Example:
        "group sums/train/7 raised KeyError: 12" and "group sums/train/8 raised KeyError: 9" are
        both "group … raised KeyError: #".
    """
    return re.sub(r"\d+(\.\d+)?", "#", failure.reason.replace(failure.group, "…"))
