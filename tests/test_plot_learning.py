"""The picture of what a run has learned."""

import importlib.util
from pathlib import Path

import pytest

from torchtitan_rl.observability.json_lines import write_lines

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("plot", ROOT / "scripts/plot_learning.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_run(folder: Path, rewards: list[float]) -> Path:
    folder.mkdir()
    rows = [
        {"step": step, "reward/all/mean": reward, "accuracy/all/mean": reward}
        for step, reward in enumerate(rewards)
    ]
    rows[0] |= {"eval/reward": 0.1, "eval/accuracy": 0.0}
    rows.append({"step": len(rewards), "eval/reward": 0.8, "eval/accuracy": 0.7})
    write_lines(folder / "metrics.jsonl", rows)
    return folder


def test_runs_are_drawn_into_one_picture(script, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(script.plt, "close", drawn.append)
    runs = [write_run(tmp_path / name, [0.1, 0.2, 0.4]) for name in ("a", "b")]
    picture = tmp_path / "picture.png"
    assert script.main([*map(str, runs), str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    reward, accuracy = drawn[0].axes
    lines = [line.get_xydata().tolist() for line in reward.lines]
    assert lines[:2] == [[[0, 0.1], [1, 0.2], [2, 0.4]], [[0, 0.1], [3, 0.8]]]
    assert len(lines) == 4
    assert accuracy.lines[1].get_ydata().tolist() == [0.0, 0.7]


def test_a_folder_that_is_no_run_is_named(script, tmp_path, capsys):
    assert script.main([str(tmp_path), str(tmp_path / "picture.png")]) == 2
    assert f"{tmp_path} is no folder of a run" in capsys.readouterr().err
    assert not (tmp_path / "picture.png").exists()
