"""Whether a run collapses: reward or tool calls gone, entropy gone, KL or gradient exploding.

A pure function of the rows of metrics.jsonl, so that a resumed run goes on where it was.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.observability.console import console
from torchtitan_rl.observability.run_folder import RunFolder, find_checkpoints

WINDOW = 3
"""Steps that are taken together: a single one may be chance."""
FALLEN = 0.25
"""Share of its best level below which a reward, or the number of tool calls, is as good as gone."""
STANDARD_ERRORS = 4.0
"""How sure a fall must be. Samples of one prompt are alike, so the error of a mean of samples is
larger than if each stood for itself."""
ENTROPY_LEFT = 0.02
"""Share of its first level below which entropy is as good as gone."""
SOLVED = 0.9
"""From this accuracy on, a policy may be sure of itself."""
MOST_KL = {"mismatch_kl/all/mean": 0.3, "rollout_kl": 0.3, "ref_kl": 2.0}
"""KL in nats per token that no healthy run has."""
EXPLODED = 10.0
"""How many times its usual size, and `trainer.max_grad_norm`, a gradient norm must have."""
WORSE = 4.0
"""A collapse is reported again when it is this many times as bad as at its last report."""
ALL_GONE = 10.0
"""Badness when nothing is left: a fall to 0 is reported once."""
TOO_MUCH_ECHO = 0.5
"""Share of the gradient from which on Echo may be to blame."""
TOO_FEW_RIGHT = 0.1
"""Share of right samples at the start below which the start may be to blame."""


class CollapseError(TorchtitanRLError, RuntimeError):
    """A run collapsed, and `supervision.stop_on_collapse` is set; the message says how and why."""


@dataclass(slots=True)
class Level:
    """A metric: its mean over the last steps, the best one before them, its first value."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=2 * WINDOW))
    spreads: deque[float] = field(default_factory=lambda: deque(maxlen=2 * WINDOW))
    seen: int = 0
    best: float = -math.inf
    best_spread: float = 0.0
    first: float = math.nan
    logs: float = 0.0
    """Sum of the logarithms of all values before the last ones."""

    def add(self, value: float | None, spread: float | None = None) -> None:
        """The value of a step, if it has one, and the standard deviation of what it is the mean
        of."""
        if value is None:
            return
        self.values.append(value)
        self.spreads.append(spread or 0.0)
        self.seen += 1
        if self.seen == 1:
            self.first = value
        if not self.known:
            return
        before = list(self.values)[:-WINDOW]
        self.logs += math.log(max(before[-1], 1e-30))
        if fmean(before) > self.best:
            self.best, self.best_spread = fmean(before), fmean(list(self.spreads)[:-WINDOW])

    @property
    def known(self) -> bool:
        """Whether there is something to compare the last steps with."""
        return self.seen > WINDOW

    @property
    def now(self) -> float:
        return fmean(list(self.values)[-WINDOW:])

    @property
    def least(self) -> float:
        """The smallest of the last values: what rises for a single step may be chance."""
        return min(list(self.values)[-WINDOW:])

    @property
    def usual(self) -> float:
        """The geometric mean of all values before the last ones."""
        return math.exp(self.logs / (self.seen - WINDOW))

    def fall(self, samples: float) -> float:
        """How badly it has fallen from its best, if that was above 0: from 1 on it is as good as
        gone. `samples` are those that each value is the mean of."""
        if not self.known or self.best <= 0:
            return 0.0
        sure = STANDARD_ERRORS * self.best_spread / math.sqrt(max(samples, 1.0))
        return _times(FALLEN * self.best, self.now) if self.best - self.now > sure else 0.0

    def __str__(self) -> str:
        if not self.known:
            return "is not known"
        return f"fell from {self.best:.2g} to {self.now:.2g} (means of {WINDOW} steps)"


@dataclass(slots=True)
class Evaluations:
    """Held-out accuracy: one evaluation has enough prompts to stand for itself."""

    best: float = 0.0
    now: float = 0.0
    prompts: float = 1.0

    def add(self, accuracy: float | None, prompts: float | None) -> None:
        """The accuracy of an evaluation, if there was one."""
        if accuracy is not None:
            self.now, self.prompts = accuracy, prompts or 1.0
            self.best = max(self.best, accuracy)

    def fall(self) -> float:
        """How badly it has fallen from its best, as that of a `Level`."""
        spread = math.sqrt(self.best * (1.0 - self.best))
        sure = self.best - self.now > STANDARD_ERRORS * spread / math.sqrt(self.prompts)
        return _times(FALLEN * self.best, self.now) if sure else 0.0

    def __str__(self) -> str:
        return f"fell from {self.best:.0%} to {self.now:.0%}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One way in which a run may be collapsing."""

    kind: str
    badness: float
    """From 1 on it is a collapse; below 1/2 all is well."""
    said: str


class CollapseGuard:
    """Watches the metrics of a run; says while it happens that the run collapses, and why.

    Each kind of collapse is reported once, and again when it has become four times as bad. With
    `supervision.stop_on_collapse` the first report is an error.

    Example:
        guard = CollapseGuard(config, folder)
        guard.recall(read_metrics(folder.metrics_file))  # of a resumed run
        guard.check(step, values)
    """

    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        self._config, self._folder = config, folder
        sizes = [config.sampling_of(part).n for part in config.task.parts()]
        self._samples = config.prompts_per_step * min(sizes)
        self._levels: dict[str, Level] = {}
        self._evaluations = Evaluations()
        self._said: dict[str, float] = {}
        self._last_good = 0
        self._echo_share = 0.0

    def recall(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Take note of earlier steps of the run, in silence."""
        for row in rows:
            self._find(int(row["step"]), row)

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Take note of a step, and say what it shows."""
        found = self._find(step, values)
        if not found:
            return
        accuracy = self._level("accuracy/all").first
        causes = "; ".join(likely_causes(self._config, accuracy, self._echo_share))
        said = f"{'; '.join(finding.said for finding in found)}. Likely causes: {causes}"
        if self._config.supervision.stop_on_collapse:
            raise CollapseError(
                f"the run collapsed (supervision.stop_on_collapse is set): {said}. "
                f"{self._way_back()}"
            )
        console.print(f"warning: the run is collapsing: {said}. {self._way_back()}", markup=False)

    def _find(self, step: int, values: Mapping[str, float]) -> list[Finding]:
        """What is new after this step."""
        self._add(values)
        findings = list(self._findings())
        if all(finding.badness < 1 / 2 for finding in findings):
            self._last_good = step
        new = []
        for finding in findings:
            if finding.badness < 1 / 2:
                self._said.pop(finding.kind, None)
            elif finding.badness >= max(1.0, WORSE * self._said.get(finding.kind, 0.0)):
                self._said[finding.kind] = finding.badness
                new.append(finding)
        return new

    def _add(self, values: Mapping[str, float]) -> None:
        for name in ("accuracy/all", "reward/all", "tool_calls/ok/all", "entropy/all"):
            self._level(name).add(values.get(f"{name}/mean"), values.get(f"{name}/std"))
        for name in (*MOST_KL, "train/grad_norm"):
            self._level(name).add(values.get(name))
        self._evaluations.add(values.get("eval/accuracy"), values.get("eval/prompts"))
        # The last one known: without any signal for RL there is no share.
        self._echo_share = values.get("grad_share/echo", self._echo_share)

    def _level(self, name: str) -> Level:
        return self._levels.setdefault(name, Level())

    def _findings(self) -> Iterator[Finding]:
        accuracy, reward = self._level("accuracy/all"), self._level("reward/all")
        falls = [
            (accuracy.fall(self._samples), f"the accuracy of samples {accuracy}"),
            (reward.fall(self._samples), f"the reward {reward}"),
            (self._evaluations.fall(), f"held-out accuracy {self._evaluations}"),
        ]
        yield Finding("reward", *max(falls, key=lambda fall: fall[0]))
        tools = self._level("tool_calls/ok/all")
        # A policy that does better without its tools has not collapsed.
        if tools.known and reward.now < reward.best:
            said = f"the number of tool calls per rollout that succeed {tools}"
            yield Finding("tools", tools.fall(self._samples), said)
        entropy = self._level("entropy/all")
        if entropy.known and accuracy.known and accuracy.now < SOLVED:
            badness = _times(ENTROPY_LEFT * entropy.first, entropy.now)
            said = f"the entropy of the policy fell from {entropy.first:.2g} to {entropy.now:.2g}"
            yield Finding("entropy", badness, f"{said}, and not because the task is solved")
        for name, most in MOST_KL.items():
            if (level := self._level(name)).known:
                said = f"{name.partition('/')[0]} rose to {level.least:.2g} nats per token"
                yield Finding(name, level.least / most, said)
        norm = self._level("train/grad_norm")
        if norm.known:
            usual = max(norm.usual, self._config.trainer.max_grad_norm)
            said = f"the norm of the gradient rose from {norm.usual:.2g} to {norm.least:.2g}"
            yield Finding("grad_norm", norm.least / (EXPLODED * usual), said)

    def _way_back(self) -> str:
        run = self._folder.path.name
        good = [s for s in find_checkpoints(self._folder.checkpoints) if s <= self._last_good]
        if not good:
            return "No checkpoint from before the collapse is kept: start again with other settings"
        return (
            "To continue from before the collapse with other settings: "
            f"--fork_from {run}@{good[-1]}, before newer checkpoints replace that one"
        )


def likely_causes(config: RunConfig, first_accuracy: float, echo_share: float) -> Iterator[str]:
    """What the settings and the metrics of a run say about why, each with the setting to change."""
    loss = config.trainer.loss
    if echo_share > TOO_MUCH_ECHO:
        yield (
            f"Echo has {echo_share:.0%} of the gradient (lower trainer.loss.echo_share, which is "
            f"{loss.echo_share:g})"
        )
    yield (
        "the learning rate is too high for this model and task (lower trainer.optimizer.lr, which "
        f"is {config.trainer.optimizer.lr:g})"
    )
    if first_accuracy < TOO_FEW_RIGHT:
        what = "raise warm_start.steps" if config.warm_start else "teach it the form first"
        yield f"at the start only {first_accuracy:.1%} of samples were right ({what})"
    if config.max_offpolicy_steps and not loss.correction.on:
        yield (
            f"samples are up to {config.max_offpolicy_steps} steps old (lower max_offpolicy_steps, "
            "or see trainer.loss.correction)"
        )
    if not loss.ref_kl.on:
        yield "nothing holds the policy near its start (trainer.loss.ref_kl.coef 0.01 would)"


def _times(limit: float, value: float) -> float:
    """How many times below a limit a value is, up to a point."""
    return limit / max(value, limit / ALL_GONE)
