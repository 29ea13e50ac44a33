"""What came to nothing: logged one by one, counted, and told to the person without a flood."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchtitan_rl.observability.console import console
from torchtitan_rl.observability.run_folder import RunFolder
from torchtitan_rl.rollout.metrics import CHOSEN, failure_metrics

if TYPE_CHECKING:
    from torchtitan_rl.rollout.loop import Failure, Group

LONGEST_REASON = 400
"""Characters of a reason on the console; the log has all of it."""


class Failures:
    """Notes failures, and warns of a reason once: later steps only count, at the end of their line.

    Example:
        failures = Failures(folder, tasks=["sums"])
        failures.of_step(3, groups)  # {"rollouts/failed/all": 4.0, "groups/dropped/all": 1.0, ...}
    """

    def __init__(self, folder: RunFolder, tasks: Sequence[str]) -> None:
        self._folder, self._tasks = folder, list(tasks)
        self._said: set[tuple[str, str]] = set()

    def of_step(self, step: int, groups: Sequence["Group"]) -> dict[str, float]:
        """The metrics of what failed since the last step."""
        failures = self._log(step, groups)
        if failed := [failure for failure in failures if failure.kind not in CHOSEN]:
            rollouts = sum(failure.rollouts for failure in failed)
            names = {failure.group for failure in failed}
            whose = f"{len(names)} groups" if len(names) > 1 else f"group {failed[0].group}"
            what = f"{rollouts} rollout{'s' * (rollouts > 1)} of {whose} failed"
            self._warn("step", what, failed)
        return failure_metrics(failures, self._tasks)

    def of_evaluation(self, step: int, groups: Sequence["Group"]) -> dict[str, float]:
        """How many held-out prompts have no part in the evaluation, if any."""
        failed = self._log(step, groups)
        if not failed:
            return {}
        self._warn("evaluation", f"{len(failed)} of {len(groups)} held-out prompts failed", failed)
        return {"rollouts/failed/evaluation": len(failed)}

    def _log(self, step: int, groups: Sequence["Group"]) -> list["Failure"]:
        failures = [failure for group in groups for failure in group.failures]
        self._folder.log_failures(step, failures)
        return failures

    def _warn(self, where: str, what: str, failures: Sequence["Failure"]) -> None:
        """One line, of the first reason that is new there; none if they are all known. Another new
        one is told when it comes again."""
        reasons: dict[tuple[str, str], str] = {}
        for failure in failures:
            reasons.setdefault((where, likeness(failure)), failure.reason)
        new = next((like for like in reasons if like not in self._said), None)
        if new is None:
            return
        self._said.add(new)
        reason = " ".join(reasons[new].split())
        if len(reason) > LONGEST_REASON:
            reason = f"{reason[:LONGEST_REASON]} …"
        more = len(reasons) - 1
        others = f" (and {more} other reason{'s' * (more > 1)})" if more else ""
        log = f"{self._folder.relative}/logs/failures.jsonl"
        console.print(f"warning: {what}: {reason}{others}; all are in {log}", markup=False)


def likeness(failure: "Failure") -> str:
    """What reasons have in common that differ in the name of their group or in numbers.

    Example:
        "group sums/train/7 raised KeyError: 12" and "group sums/train/8 raised KeyError: 9" are
        both "group … raised KeyError: #".
    """
    return re.sub(r"\d+(\.\d+)?", "#", failure.reason.replace(failure.group, "…"))
