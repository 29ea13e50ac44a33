"""Where metrics go: metrics.jsonl and TensorBoard, under the same keys."""

import json
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class MetricsLog:
    """Appends one object a step to metrics.jsonl and the same numbers to TensorBoard.

    A resumed run first drops the lines of the steps it is going to repeat.
    """

    def __init__(self, file: Path, tensorboard: Path, *, first_step: int) -> None:
        if file.exists():
            _keep_steps_before(file, first_step)
        self._file = file.open("a", buffering=1)  # a line at a time: a killed run leaves whole ones
        self._tensorboard = SummaryWriter(str(tensorboard), purge_step=first_step)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            self._tensorboard.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()


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
