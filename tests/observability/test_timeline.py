"""Spans on one time axis, in a file that opens whatever happened to its run."""

import json

import pytest

from torchtitan_rl.observability import timeline
from torchtitan_rl.observability.timeline import Timeline
from torchtitan_rl.view.lines import parse, tail


def read(path):
    """Read a timeline as viewers do: a list that may lack its end."""
    return json.loads(path.read_text().rstrip().rstrip(",]") + "]")


def spans(path):
    rows = {e["tid"]: e["args"]["name"] for e in read(path) if e["name"] == "thread_name"}
    return [(rows[e["tid"]], e["name"], e["args"]) for e in read(path) if e["ph"] == "X"]


def test_a_span_has_a_row_a_start_and_a_length(tmp_path):
    log = Timeline(tmp_path / "timeline.json")
    with log.span("trainer", "train", step=3), log.span("grader", "grade"):
        pass
    # Not closed: as after a kill.
    inner, outer = (e for e in read(tmp_path / "timeline.json") if e["ph"] == "X")
    assert spans(tmp_path / "timeline.json") == [
        ("grader", "grade", {}),
        ("trainer", "train", {"step": 3}),
    ]
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1000


def test_spans_of_one_lane_that_overlap_get_rows_of_their_own(tmp_path):
    log = Timeline(tmp_path / "timeline.json")
    with log.span("generator 0", "a"):
        with log.span("generator 0", "b"):
            pass
        with log.span("generator 0", "c"):
            pass
    with log.span("generator 0", "d"):
        pass
    rows = {name: row for row, name, _ in spans(tmp_path / "timeline.json")}
    assert rows == {
        **dict.fromkeys("ad", "generator 0"),
        **dict.fromkeys("bc", "generator 0 (2)"),
    }


def test_what_fails_is_there_too(tmp_path):
    log = Timeline(tmp_path / "timeline.json")
    with pytest.raises(KeyError), log.span("trainer", "train"):
        raise KeyError
    with log.span("trainer", "train"):
        pass
    assert len(spans(tmp_path / "timeline.json")) == 2


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path):
    path = tmp_path / "timeline.json"
    for times in (1, 2, 3):
        log = Timeline(path)
        with log.span("trainer", "train"):
            pass
        assert len(spans(path)) == times  # also if it is killed here
        log.close()
        assert len([e for e in json.loads(path.read_text()) if e["ph"] == "X"]) == times


def test_a_killed_run_goes_on_and_ends_in_order(tmp_path):
    path = tmp_path / "timeline.json"
    killed, resumed = Timeline(path), Timeline(path)
    for log in (killed, resumed):
        with log.span("trainer", "train"):
            pass
        if log is killed:
            assert log._file is not None
            log._file.close()  # as the kernel does, without an end
    resumed.close()
    resumed.close()
    assert len([e for e in json.loads(path.read_text()) if e["ph"] == "X"]) == 2


def test_a_reader_that_follows_misses_nothing_and_sees_nothing_twice(tmp_path):
    """The reader follows as the page does, from before a run ends to after it is resumed."""
    path, cursor, seen = tmp_path / "timeline.json", "", []

    def follow():
        nonlocal cursor
        new = tail(path, cursor)
        events = [parse(line.strip().strip(b"[],")) for line in new.lines]
        seen[:] = [] if new.reset else seen
        seen.extend(event["name"] for event in events if event and event["ph"] == "X")
        cursor = new.cursor

    for name in "abc":
        log = Timeline(path)
        with log.span("trainer", name):
            pass
        follow()
        log.close()
        follow()
    assert seen == ["a", "b", "c"]


def test_a_file_that_grew_large_makes_room(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "MOST_BYTES", 2000)
    log = Timeline(tmp_path / "timeline.json")
    for number in range(100):
        with log.span("trainer", str(number)):
            pass
    assert {path.name for path in tmp_path.iterdir()} == {"timeline.json", "timeline.old.json"}
    numbers = [
        int(name)
        for file in ("old.json", "json")
        for _, name, _ in spans(tmp_path / f"timeline.{file}")
    ]
    assert numbers == list(range(numbers[0], 100))
    assert all(path.stat().st_size < 2500 for path in tmp_path.iterdir())
    assert isinstance(json.loads((tmp_path / "timeline.old.json").read_text()), list)


def test_none_is_written_if_nobody_wants_it(tmp_path):
    with Timeline().span("trainer", "train"):
        pass
    assert not list(tmp_path.iterdir())
