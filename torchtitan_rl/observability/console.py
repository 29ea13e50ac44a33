"""Console output of a run: a progress bar, one line per step, a table at the end."""

import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from torchtitan_rl.core.intervals import change_interval, share_interval
from torchtitan_rl.observability.run_folder import RunFolder
from torchtitan_rl.observability.sinks import read_metrics

FAILED_PROMPTS = "rollouts/failed/evaluation"
"""Metric: held-out prompts that failed, so that an evaluation's numbers leave them out."""
NO_MEANS = ("eval/prompts", FAILED_PROMPTS)
"""How the metrics of an evaluation begin that count prompts."""

console = Console(highlight=False, soft_wrap=True)
error_console = Console(highlight=False, soft_wrap=True, stderr=True)


def print_error(what: str, message: str) -> None:
    """Print an error to stderr: what went wrong in red, then the message as it is, with brackets
    and backslashes."""
    error_console.print(Text.assemble((what, "bold red"), f": {message}"))


def busy(what: str) -> AbstractContextManager:
    """Shows that something takes seconds: a spinner in a terminal, else a line."""
    if console.is_terminal:
        return console.status(what)
    console.print(f"{what} ...", markup=False)
    return nullcontext()


class StepProgress:
    """Progress bar over the steps of a long computation.

    Example:
        with StepProgress("training", total=90) as progress:
            progress.advance("step 1  reward 0.61")
    """

    def __init__(self, what: str, *, total: int, done: int = 0) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task(what, total=total, completed=done)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def advance(self, line: str | None = None) -> None:
        """Count one step as done, and print a line above the bar."""
        if line is not None:
            console.print(line, markup=False)
        self._progress.advance(self._task)


def step_line(step: int, values: Mapping[str, float]) -> str:
    """The console line of one step: what was learned and where the seconds went.

    Example:
        step   12  reward 0.713  accuracy  62 %  5211 tok/s  generate 0.9 s  grade 0.0 s ...
    """
    parts = [f"step {step:4d}"]
    if "reward/all/mean" in values:
        parts.append(f"reward {values['reward/all/mean']:.3f}")
        parts.append(f"accuracy {values['accuracy/all/mean']:4.0%}")
        if "echo_nll/mean" in values:
            share = values.get("grad_share/echo")
            of_gradient = "" if share is None else f" ({share:.0%} of the gradient)"
            parts.append(f"echo {values['echo_nll/mean']:.2f}{of_gradient}")
        for whose, share in bad_calls(values).items():
            parts.append(f"{share:.0%} of tool calls {whose}")
        parts.append(f"{values['tokens_per_second']:5.0f} tok/s")
        phases = ("generate", "grade", "train", "sync")
        parts += [f"{p} {values[f'time/{p}']:.2f} s" for p in phases if f"time/{p}" in values]
    for done in ("truncated", "dropped"):
        if count := values.get(f"overlong/{done}"):
            parts.append(f"│ {count:.0f} overlong episodes {done}")
    for key, what in (("failed", "failed"), ("partial", "lost samples")):
        if count := values.get(f"groups/{key}/all"):
            parts.append(f"│ {count:.0f} group{'s' * (count > 1)} {what}")
    if "eval/accuracy" in values:
        parts.append(f"│ held-out accuracy {values['eval/accuracy']:.1%}")
        if values.get(FAILED_PROMPTS):
            parts.append(f"of {_prompts(values)} prompts")
    return "  ".join(parts)


def _prompts(values: Mapping[str, float]) -> str:
    """How many held-out prompts an evaluation covers.

    Example:
        >>> _prompts({"eval/prompts": 10, "rollouts/failed/evaluation": 2})
        '10 of 12'
    """
    if (graded := values.get("eval/prompts")) is None:  # older runs did not count them
        return "?"
    return f"{graded:.0f} of {graded + values.get(FAILED_PROMPTS, 0):.0f}"


def bad_calls(values: Mapping[str, float]) -> dict[str, float]:
    """Shares of tool calls that were not `ok`, by whose fault that is; none if there are none.

    Example:
        {"wrong": 0.25, "failed": 0.02}: a quarter was wrong, the model's fault; the tools failed at
        one in fifty.
    """
    calls = {
        key.split("/")[1]: value
        for key, value in values.items()
        if key.startswith("tool_calls/") and key.endswith("/all/mean")
    }
    total = sum(calls.values())
    shares = {
        "wrong": calls.get("malformed", 0.0) + calls.get("unknown", 0.0),
        "failed": calls.get("raised", 0.0) + calls.get("timed_out", 0.0),
    }
    return {whose: share / total for whose, share in shares.items() if share}


def print_summary(folder: RunFolder) -> None:
    """Print a table of the first and the last evaluation, then the paths of the run's files."""
    evaluations = [
        {k: value for k, value in row.items() if k.startswith("eval/") or k == FAILED_PROMPTS}
        for row in read_metrics(folder.metrics_file)
        if "eval/accuracy" in row
    ]
    if evaluations:
        _print_evaluations(folder, evaluations[0], evaluations[-1])
    for what, path in {
        "metrics": folder.metrics_file,
        "TensorBoard": folder.tensorboard,
        "rollouts": folder.rollouts,
        "tokens": folder.tokens,
        "checkpoints": folder.checkpoints,
        "final model": folder.model,
    }.items():
        if not path.exists():
            continue
        console.print(f"{what:<12} {folder.relative}/{path.name}", markup=False)
    console.print(f"look at it   {_view_command()} {folder.relative}", markup=False)


def _view_command() -> str:
    """The command that shows a run: the script, where it is installed beside this Python; with its
    path, unless the shell finds it without."""
    script = Path(sys.executable).with_name("torchtitan-rl")
    if shutil.which(script.name) == str(script):
        return f"{script.name} view"
    if script.is_file():
        return f"{os.path.relpath(script)} view"
    return f"{os.path.relpath(sys.executable)} -m torchtitan_rl.view"


def _print_evaluations(
    folder: RunFolder, before: Mapping[str, float], after: Mapping[str, float]
) -> None:
    counts = _prompts(before), _prompts(after)
    alike = FAILED_PROMPTS not in before.keys() | after.keys() and counts[0] == counts[1]
    many = f"{before['eval/prompts']:.0f} " if alike and "eval/prompts" in before else ""
    table = Table(
        title=Text(f"{folder.path.name}: greedy, on {many}held-out prompts"),
        title_justify="left",
    )
    for column in ("", "before", "after", "change"):
        table.add_column(column, justify="right" if column else "left")
    names = sorted(key for key in before.keys() & after.keys() if not key.startswith(NO_MEANS))
    rows = [_accuracy_row if key.startswith("eval/accuracy") else _reward_row for key in names]
    for key, row in zip(names, rows, strict=True):
        table.add_row(key.removeprefix("eval/"), *row(key, before, after))
    if not alike:
        table.add_row("of prompts", *counts, "not the same" if counts[0] != counts[1] else "")
    console.print(table)
    if "eval/prompts" in before and "eval/prompts" in after:
        console.print("in brackets: 95 % intervals", markup=False)


def _reward_row(
    key: str, before: Mapping[str, float], after: Mapping[str, float]
) -> tuple[str, str, str]:
    return f"{before[key]:.3f}", f"{after[key]:.3f}", f"{after[key] - before[key]:+.3f}"


def _accuracy_row(
    key: str, before: Mapping[str, float], after: Mapping[str, float]
) -> tuple[str, str, str]:
    """Accuracy before and after, and its change in points; with intervals if it is known of how
    many prompts they are.

    Example:
        41.5% (35–48), 84.5% (79–89), +43.0 points (+34 to +51)
    """
    left, right = before[key], after[key]
    counted = key.replace("accuracy", "prompts", 1)
    texts = f"{left:.1%}", f"{right:.1%}", f"{(right - left) * 100:+.1f} points"
    if counted not in before or counted not in after:
        return texts
    counts = before[counted], after[counted]
    one, other = share_interval(left, counts[0]), share_interval(right, counts[1])
    low, high = change_interval(left, right, counts)
    return (
        f"{texts[0]} ({one[0] * 100:.0f}–{one[1] * 100:.0f})",
        f"{texts[1]} ({other[0] * 100:.0f}–{other[1] * 100:.0f})",
        f"{texts[2]} ({low * 100:+.0f} to {high * 100:+.0f})",
    )
