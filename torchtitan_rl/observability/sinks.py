"""Metric sinks: metrics.jsonl, TensorBoard and, if configured, W&B, all with the same keys."""

import importlib
import json
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torchtitan_rl.observability.json_lines import encode

if TYPE_CHECKING:
    from torchtitan_rl.config.run import RunConfig
    from torchtitan_rl.observability.run_folder import RunFolder


class Sink(Protocol):
    """Destination of a step's metrics."""

    def write(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsLog:
    """All sinks of a run. A resumed run first removes the steps that it repeats.

    Example:
        log = MetricsLog(JsonLines(folder / "metrics.jsonl", first_step=0))
        log.write(0, {"reward/all/mean": 0.4})
    """

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write the metrics of one step to every sink."""
        for sink in self._sinks:
            sink.write(step, values)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def open_metrics_log(folder: "RunFolder", config: "RunConfig", *, first_step: int) -> MetricsLog:
    """The sinks that the config names."""
    sinks: list[Sink] = [
        JsonLines(folder.metrics_file, first_step=first_step),
        TensorBoard(folder.tensorboard, first_step=first_step),
    ]
    if config.log.wandb_project:
        sinks.append(WandB(config.log.wandb_project, folder.path, config.to_dict()))
    return MetricsLog(*sinks)


class JsonLines:
    """Sink that writes one JSON object per step; a killed run leaves complete lines."""

    def __init__(self, file: Path, *, first_step: int) -> None:
        if file.exists():
            _keep_steps_before(file, first_step)
        self._file = file.open("a", buffering=1)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._file.write(encode({"step": step, **values}).decode() + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Sink that writes TensorBoard event files."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        # Here, because they import torch, which the command line must not wait for.
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._summary = Summary
        self._writer = SummaryWriter(str(folder), purge_step=first_step)
        self._events: Any = self._writer.file_writer

    def write(self, step: int, values: dict[str, float]) -> None:
        # One event for all: `add_scalar` makes one per metric, and blocks when there are many.
        value = self._summary.Value
        scalars = [value(tag=name, simple_value=float(v)) for name, v in values.items()]
        self._events.add_summary(self._summary(value=scalars), step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Sink that logs to Weights & Biases, which is imported only when a project is configured.

    A resumed run continues there with the first step that is new to it.
    """

    def __init__(self, project: str, folder: Path, config: dict[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        kept = folder / "wandb_id"  # another run may have had the same name
        if not kept.exists():
            kept.write_text(uuid.uuid4().hex[:16])
        self._run = wandb.init(
            project=project,
            name=folder.name,
            id=kept.read_text(),
            dir=str(folder),
            config=config,
            resume="allow",
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


def read_metrics(file: Path) -> list[dict[str, float]]:
    """The objects of a metrics.jsonl; a half-written last line is left out."""
    rows = []
    for line in file.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def _keep_steps_before(file: Path, first_step: int) -> None:
    kept = [row for row in read_metrics(file) if row["step"] < first_step]
    temporary = file.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
    temporary.rename(file)
