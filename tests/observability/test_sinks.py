"""metrics.jsonl, TensorBoard and W&B: the same numbers, whole lines, no step twice."""

import json
import re
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtitan_rl.observability.sinks import (
    JsonLines,
    MetricsLog,
    TensorBoard,
    WandB,
    read_metrics,
)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def tensorboard(tmp_path):
    return tmp_path / "tensorboard"


def write(file, tensorboard, rows, first_step=0):
    log = MetricsLog(
        JsonLines(file, first_step=first_step), TensorBoard(tensorboard, first_step=first_step)
    )
    for step, values in rows:
        log.write(step, values)
    log.close()


def events(tensorboard):
    """{key: [(step, value)]} as TensorBoard itself would show it."""
    accumulator = EventAccumulator(str(tensorboard))
    accumulator.Reload()
    return {
        key: [(event.step, event.value) for event in accumulator.Scalars(key)]
        for key in accumulator.Tags()["scalars"]
    }


def age(tensorboard):
    """Date the event files back: TensorBoard reads by name, and names only tell seconds apart."""
    for events_file in tensorboard.iterdir():
        second = re.search(r"tfevents\.(\d+)", events_file.name)[1]
        events_file.rename(tensorboard / events_file.name.replace(second, str(int(second) - 60)))


ROWS = [(0, {"loss": 0.5, "reward/all/mean": 1.0}), (1, {"loss": 0.25, "eval/accuracy": 0.75})]


def test_each_step_is_one_line_with_its_number(file, tensorboard):
    write(file, tensorboard, ROWS)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == [{"step": step, **values} for step, values in ROWS]
    assert read_metrics(file) == lines


def test_tensorboard_has_the_same_keys_steps_and_values(file, tensorboard):
    write(file, tensorboard, ROWS)
    expected = {}
    for row in read_metrics(file):
        step = row.pop("step")
        for key, value in row.items():
            expected.setdefault(key, []).append((step, value))
    assert events(tensorboard) == expected
    assert expected.keys() == {"loss", "reward/all/mean", "eval/accuracy"}


def test_a_line_is_on_disk_before_the_log_is_closed(file):
    log = MetricsLog(JsonLines(file, first_step=0))
    log.write(0, {"loss": 0.5})
    assert read_metrics(file) == [{"step": 0, "loss": 0.5}]
    log.close()


@pytest.mark.parametrize("rest", ['{"step": 2, "loss": 0.', '{"step": 2', "{", '{"step": 2, "lo'])
def test_a_half_written_last_line_is_left_out(file, tensorboard, rest):
    write(file, tensorboard, ROWS)
    before = read_metrics(file)
    with file.open("a") as half:
        half.write(rest)
    assert read_metrics(file) == before


def test_a_resumed_log_starts_on_a_line_of_its_own_after_a_half_written_one(file, tensorboard):
    write(file, tensorboard, ROWS)
    with file.open("a") as half:
        half.write('{"step": 2, "lo')
    write(file, tensorboard, [(2, {"loss": 0.125})], first_step=2)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[-1] == {"step": 2, "loss": 0.125}


@pytest.mark.parametrize("first_step", [0, 1, 3, 5])
def test_a_resumed_log_drops_the_steps_it_repeats(file, tensorboard, first_step):
    write(file, tensorboard, [(step, {"loss": step + 0.5}) for step in range(5)])
    age(tensorboard)
    again = [(step, {"loss": step + 0.25}) for step in range(first_step, 6)]
    write(file, tensorboard, again, first_step=first_step)
    kept = [(step, step + 0.5) for step in range(first_step)]
    repeated = [(step, step + 0.25) for step in range(first_step, 6)]
    assert [(row["step"], row["loss"]) for row in read_metrics(file)] == kept + repeated
    assert events(tensorboard) == {"loss": kept + repeated}


def test_resuming_leaves_no_temporary_file(file, tensorboard, tmp_path):
    write(file, tensorboard, ROWS)
    write(file, tensorboard, [], first_step=1)
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "tensorboard"}


def test_wandb_gets_the_same_numbers(tmp_path, monkeypatch):
    """A stand-in with wandb's interface: the real one wants its own servers."""
    (tmp_path / "wandb.py").write_text(
        "import json, pathlib\n"
        "class Run:\n"
        "    def __init__(self, **about): self.lines = [about]\n"
        "    def log(self, values, step): self.lines.append([step, values])\n"
        "    def finish(self):\n"
        "        out = pathlib.Path(self.lines[0]['dir']) / 'sent.json'\n"
        "        out.write_text(json.dumps(self.lines))\n"
        "def init(**about): return Run(**about)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    folder = tmp_path / "my-run"
    folder.mkdir()
    log = MetricsLog(WandB("project", folder, {"steps": 2}))
    for step, values in ROWS:
        log.write(step, values)
    log.close()
    about, *sent = json.loads((folder / "sent.json").read_text())
    assert (about["project"], about["name"], about["config"]) == ("project", "my-run", {"steps": 2})
    assert about["id"] == (folder / "wandb_id").read_text()  # by which a resumed run finds itself
    assert about["resume"] == "allow"
    assert sent == [[step, values] for step, values in ROWS]
