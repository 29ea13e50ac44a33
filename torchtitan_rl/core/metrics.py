"""Metrics are typed values that know how they merge; nothing is reduced by the look of its name.

Each rank returns its own values and the controller merges them: no collective is involved, so ranks
may have different keys.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    import torch


class Metric(Protocol):
    def merge(self, other: Self) -> Self: ...

    def values(self) -> dict[str, float]:
        """Suffix to number; the suffix '' stands for the metric's own name."""
        ...


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean: `total` over `weight`.

    Example:
        >>> Mean(6.0, 3.0).merge(Mean(0.0, 1.0)).values()
        {'': 1.5}
    """

    total: float
    weight: float

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)

    def values(self) -> dict[str, float]:
        return {"": self.total / self.weight} if self.weight else {}


@dataclass(frozen=True, slots=True)
class Sum:
    """A count or an amount: adds up."""

    total: float

    def merge(self, other: "Sum") -> "Sum":
        return Sum(self.total + other.total)

    def values(self) -> dict[str, float]:
        return {"": self.total}


@dataclass(frozen=True, slots=True)
class Same:
    """A value that every rank knows, such as a learning rate; merging checks that they agree."""

    value: float

    def merge(self, other: "Same") -> "Same":
        if not math.isclose(self.value, other.value, rel_tol=1e-5, abs_tol=1e-12):
            raise ValueError(f"ranks disagree on a value they share: {self.value} != {other.value}")
        return self

    def values(self) -> dict[str, float]:
        return {"": self.value}


@dataclass(frozen=True, slots=True)
class Distribution:
    """Count, mean, standard deviation and maximum of many values; no value, no number.

    Example:
        >>> Distribution.of([1.0, 3.0]).values()
        {'mean': 2.0, 'std': 1.0, 'max': 3.0}
    """

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    largest: float = -math.inf

    @classmethod
    def of(cls, values: "Iterable[float] | torch.Tensor") -> "Distribution":
        import torch  # only those who measure need it: configs and the page do not

        if not isinstance(values, torch.Tensor):
            values = torch.tensor(list(values), dtype=torch.float64)
        if values.numel() == 0:
            return cls()
        values = values.detach().double()
        return cls(
            float(values.numel()),
            values.sum().item(),
            values.square().sum().item(),
            values.max().item(),
        )

    def merge(self, other: "Distribution") -> "Distribution":
        return Distribution(
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
            max(self.largest, other.largest),
        )

    def values(self) -> dict[str, float]:
        if not self.count:
            return {}
        mean = self.total / self.count
        variance = max(self.squares / self.count - mean * mean, 0.0)
        return {"mean": mean, "std": math.sqrt(variance), "max": self.largest}


Metrics = dict[str, Metric]


def by_task(
    values: "Mapping[str, torch.Tensor]", tasks: Sequence[str], sequence_ids: "torch.Tensor"
) -> Metrics:
    """`{metric}/{all,<task>}` of [tokens] values, by the task of each token's sequence.

    Example:
        >>> ids = torch.tensor([0, 0, 1])
        >>> flatten(by_task({"age": torch.tensor([1.0, 3.0, 8.0])}, ["sums", "words"], ids))
        {'age/all/mean': 4.0, ..., 'age/sums/mean': 2.0, ..., 'age/words/max': 8.0}
    """
    import torch

    metrics: Metrics = {f"{name}/all": Distribution.of(of_all) for name, of_all in values.items()}
    known = list(dict.fromkeys(tasks))
    if len(known) < 2:  # as nearly always: nothing to take apart
        return metrics | {f"{n}/{task}": metrics[f"{n}/all"] for n in values for task in known}
    numbers = torch.tensor([known.index(task) for task in tasks], device=sequence_ids.device)
    of_token = numbers[sequence_ids]
    for number, task in enumerate(known):
        own = of_token == number
        metrics |= {f"{n}/{task}": Distribution.of(of_all[own]) for n, of_all in values.items()}
    return metrics


def merge_metrics(many: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Merge what ranks, microbatches or groups returned; a key may be missing from some."""
    merged: Metrics = {}
    for metrics in many:
        for name, metric in metrics.items():
            try:
                merged[name] = merged[name].merge(metric) if name in merged else metric
            except ValueError as error:
                raise ValueError(f"metric {name!r}: {error}") from error
    return merged


def flatten(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Metric objects to the numbers that are logged.

    Example:
        >>> flatten({"loss": Mean(1.0, 2.0), "reward/all": Distribution.of([1.0])})
        {'loss': 0.5, 'reward/all/mean': 1.0, 'reward/all/std': 0.0, 'reward/all/max': 1.0}
    """
    return {
        f"{name}/{suffix}" if suffix else name: value
        for name, metric in metrics.items()
        for suffix, value in metric.values().items()
    }
