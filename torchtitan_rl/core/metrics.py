"""Metrics are typed values that know how they merge; nothing is reduced by the look of its name.

Each rank returns its own values and the controller merges them: no collective is involved, so ranks
may have different keys.

To read a number from a GPU is to wait for all that it was asked before. So a number of a metric may
be a tensor of one element at first; `fetch_numbers` reads all of a step's together.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias

if TYPE_CHECKING:
    import torch

Number: TypeAlias = "float | torch.Tensor"
"""A number of a metric; a tensor of one element until `fetch_numbers` has read it."""


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

    total: Number
    weight: Number

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)

    def values(self) -> dict[str, float]:
        return {"": float(self.total) / float(self.weight)} if self.weight else {}


@dataclass(frozen=True, slots=True)
class Sum:
    """A count or an amount: adds up."""

    total: Number

    def merge(self, other: "Sum") -> "Sum":
        return Sum(self.total + other.total)

    def values(self) -> dict[str, float]:
        return {"": float(self.total)}


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

    count: Number = 0.0
    total: Number = 0.0
    squares: Number = 0.0
    largest: Number = -math.inf

    @classmethod
    def of(cls, values: "Iterable[float] | torch.Tensor") -> "Distribution":
        """The distribution of some values; that of a tensor has tensors, for `fetch_numbers`."""
        import torch  # only those who measure need it: configs and the page do not

        if not isinstance(values, torch.Tensor):
            own = cls.of(torch.tensor(list(values), dtype=torch.float64))
            return cls(*map(float, (own.count, own.total, own.squares, own.largest)))
        if values.numel() == 0:
            return cls()
        values = values.detach().double()
        return cls(float(values.numel()), values.sum(), values.square().sum(), values.max())

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
        count, total, squares = map(float, (self.count, self.total, self.squares))
        mean = total / count
        variance = max(squares / count - mean * mean, 0.0)
        return {"mean": mean, "std": math.sqrt(variance), "max": float(self.largest)}


Metrics = dict[str, Metric]


def by_task(
    values: "Mapping[str, torch.Tensor]", tasks: Sequence[str], sequence_ids: "torch.Tensor"
) -> Metrics:
    """`{metric}/{all,<task>}` of [tokens] values, by the task of each token's sequence. The values
    may be on a GPU; `sequence_ids` are on the CPU, where to choose by them waits for nothing.

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
    of_token = torch.tensor([known.index(task) for task in tasks])[sequence_ids]
    for number, task in enumerate(known):
        own = (of_token == number).nonzero().squeeze(-1)
        for name, of_all in values.items():
            chosen = of_all.index_select(0, own.to(of_all.device, non_blocking=True))
            metrics[f"{name}/{task}"] = Distribution.of(chosen)
    return metrics


def fetch_numbers(many: Sequence[Mapping[str, Metric]]) -> list[Metrics]:
    """The metrics with plain numbers in place of tensors, which are read all together: a GPU is
    waited for once.

    Example:
        >>> fetch_numbers([{"loss": Mean(torch.tensor(0.5), 2.0)}])
        [{'loss': Mean(total=0.5, weight=2.0)}]
    """
    tensors = [tensor for metrics in many for m in metrics.values() for _, tensor in _tensors(m)]
    numbers = iter(_read(tensors))

    def with_numbers(metric: Any) -> Any:
        held = _tensors(metric)
        return replace(metric, **{field: next(numbers) for field, _ in held}) if held else metric

    return [{name: with_numbers(m) for name, m in metrics.items()} for metrics in many]


def _tensors(metric: Any) -> list[tuple[str, "torch.Tensor"]]:
    """Fields of a metric that are tensors, by name; a metric of the user's own may be anything."""
    import torch

    if not is_dataclass(metric):
        return []
    values = [(field.name, getattr(metric, field.name)) for field in fields(metric)]
    return [(name, value) for name, value in values if isinstance(value, torch.Tensor)]


def _read(tensors: Sequence["torch.Tensor"]) -> list[float]:
    """The numbers in tensors of one element each, by one copy from their device. As doubles, which
    hold what other types do."""
    import torch

    if not tensors:
        return []
    by_dtype = defaultdict(list)
    for place, tensor in enumerate(tensors):
        by_dtype[tensor.dtype].append(place)
    # By dtype, so that the number of kernels does not grow with that of the tensors.
    parts = [
        torch.stack([tensors[place].detach().reshape(()) for place in places]).double()
        for places in by_dtype.values()
    ]
    order = [place for places in by_dtype.values() for place in places]
    numbers = dict(zip(order, torch.cat(parts).tolist(), strict=True))
    return [numbers[place] for place in range(len(tensors))]


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
