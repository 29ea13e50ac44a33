"""The pure parts of the page: lines, columns, queries, tokens."""

import json
import sqlite3
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.view.synthetic import SyntheticRun, export_of
from torchtitan_rl.view import decode
from torchtitan_rl.view.columns import COLUMNS, columns_of
from torchtitan_rl.view.lines import line_at, objects, parse, tail
from torchtitan_rl.view.query import BadRequest, Query, contains, may_contain, preview, question
from torchtitan_rl.view.runs import NotARun, find_runs
from torchtitan_rl.view.sequences import page_columns, segments
from torchtitan_rl.view.settings import settings_of
from torchtitan_rl.view.spans import lane_and_row
from torchtitan_rl.view.viewer import to_json

TEXTS = st.sampled_from(["", "a", "12", "ä\n", "\x00", "\ud800", "<script>", "'; --"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"a": 1}\n', {"a": 1}),
        (b'{"a": NaN, "b": -Infinity}', {"a": None, "b": None}),
        (b'{"a": 1', None),
        (b'{"a": "\xff"}', None),
        (b"[1]", None),
        (b"[" * 100_000, None),
        (b"", None),
    ],
)
def test_a_line_is_an_object_or_broken(line, expected):
    assert parse(line) == expected


def test_lines_are_found_again_by_their_offset(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 0}\n\nbroken\n{"n": "\xc3\xa4"}\n{"n": 2')
    found = list(objects(path))
    assert [record for _, _, record in found] == [{"n": 0}, None, {"n": "ä"}, None]
    for offset, length, record in found:
        assert parse(line_at(path, offset, length)) == record
    assert line_at(tmp_path / "gone", 0, 9) == b""


@unhurried
@given(
    lines=st.lists(st.integers(0, 10**9), max_size=20),
    cuts=st.lists(st.integers(0, 200)).map(sorted),
)
def test_a_growing_file_is_read_once_whatever_was_written_when(tmp_path_factory, lines, cuts):
    path = tmp_path_factory.mktemp("tail") / "metrics.jsonl"
    data = "".join(json.dumps({"n": n}) + "\n" for n in lines).encode()
    seen, cursor = [], ""
    for cut in [*cuts, len(data)]:
        path.write_bytes(data[:cut])
        new = tail(path, cursor)
        cursor = new.cursor
        assert not new.reset
        seen += [json.loads(line)["n"] for line in new.lines]
    assert seen == lines


def test_a_file_that_was_replaced_is_read_from_its_start(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n')
    first = tail(path)
    assert (len(first.lines), first.reset, first.pending) == (2, False, False)
    path.write_text('{"step": 0, "again": 1}\n{"step": 1, "again": 1}\n{"st')
    second = tail(path, first.cursor)
    assert (len(second.lines), second.reset, second.pending) == (2, True, True)
    assert tail(path, "9999-00000000").reset
    assert tail(path, "garbage").reset
    path.unlink()
    assert tail(path, second.cursor).reset


def test_a_long_file_comes_in_pieces(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"n": n, "x": "y" * n}) + "\n" for n in range(100)))
    seen, cursor = [], ""
    while (new := tail(path, cursor, max_bytes=64)).lines:
        seen += [json.loads(line)["n"] for line in new.lines]
        cursor = new.cursor
    assert seen == list(range(100))


@unhurried
@given(st.dictionaries(st.sampled_from([*COLUMNS, "other"]), ANYTHING))
def test_columns_can_be_kept_whatever_a_record_holds(record):
    row = columns_of(record, "step-000003.jsonl")
    assert row[0] is not None
    marks = ", ".join("?" * len(row))
    assert len(sqlite3.connect(":memory:").execute(f"SELECT {marks}", row).fetchone()) == len(row)


@unhurried
@given(ANYTHING)
def test_answers_are_strict_json(value):
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    json.loads(to_json({"value": value}), parse_constant=refuse)


@pytest.mark.parametrize(
    ("values", "where", "arguments"),
    [
        ({"run": "a"}, "run = ?", ["a"]),
        ({"run": "a", "task": ""}, "run = ?", ["a"]),
        ({"run": "a", "task": "'; DROP"}, 'run = ? AND "task" = ?', ["a", "'; DROP"]),
        ({"run": "a", "correct": "false"}, "run = ? AND correct = ?", ["a", 0]),
        (
            {"run": "a", "step_min": "3", "step_max": "5", "reward_max": "-0.5"},
            'run = ? AND "step" >= ? AND "step" <= ? AND "reward" <= ?',
            ["a", 3, 5, -0.5],
        ),
    ],
)
def test_filters_become_sql_with_their_values_apart(values, where, arguments):
    assert Query.of(values).where() == (where, arguments)


@pytest.mark.parametrize(
    "values",
    [
        {"sort": "step; DROP TABLE rollouts"},
        {"correct": "maybe"},
        {"reward_min": "much"},
        {"step_min": "nan"},
        {"start": "1e300"},
    ],
)
def test_what_makes_no_sense_is_refused(values):
    with pytest.raises(BadRequest):
        Query.of(values)


def test_text_is_found_in_what_was_said():
    talk = [{"role": "assistant", "content": 'The "Sum" of\näpfel', "tool_calls": [{"f": "add"}]}]
    record = {"messages": talk, "expected_answer": 42}
    line = json.dumps(record).encode()
    for wanted in ("the", '"sum"', "of\nä", "ÄPFEL", '"add"', "42"):
        assert may_contain(line, wanted)
        assert contains(record, wanted)
    assert not may_contain(line, "pears")
    assert not contains({"messages": "no list"}, "list")
    assert preview(record).startswith("The")


@pytest.mark.parametrize(
    ("token", "text"),
    [("Ġhi", " hi"), ("Ċ", "\n"), ("ðŁ", "\\xf0\\x9f"), ("Ã¤", "ä"), ("日", "日")],
)
def test_byte_level_tokens_show_their_bytes(token, text):
    assert decode.byte_level_text(token) == text


@pytest.mark.parametrize(
    ("token", "text"), [("▁a", " a"), ("<0xE2>", "\\xe2"), ("<0xZZ>", "<0xZZ>")]
)
def test_sentencepiece_tokens_show_their_bytes(token, text):
    assert decode.sentencepiece_text(token) == text


def test_a_tokenizer_is_used_if_there_is_one(tmp_path):
    run = SyntheticRun(tmp_path / "run")
    ids = run.tokenizer.encode("the result 🙂<|im_end|>").ids
    pieces = decode.Decoder(run.folder).pieces([*ids, 10**6, -1])
    assert "".join(pieces[:-2]) == "the result \\xf0\\x9f\\x99\\x82<|im_end|>"
    assert pieces[-2:] == ["⟨1000000⟩", "⟨-1⟩"]
    (run.folder / "tokenizer.json").write_text("{}")
    assert "cannot be read" in decode.Decoder(run.folder).problem
    (run.folder / "tokenizer.json").unlink()
    assert decode.Decoder(run.folder).pieces([7]) == ["⟨7⟩"]


def test_tokens_have_columns_of_one_length(tmp_path):
    run = SyntheticRun(tmp_path / "run")
    record = run.record(3, 1, 0)
    [sequence] = record["sequences"]
    length = len(sequence["prompt_token_ids"]) + len(sequence["token_ids"])
    plain = page_columns(sequence, 0.5, None)
    rich = page_columns(sequence, 0.5, export_of(record, run.random))
    for columns in (plain, rich):
        assert columns.pop("own") == []
        assert {len(v) for v in columns.values() if isinstance(v, list)} == {length}
    assert {a for a, m in zip(plain["advantage"], plain["rl"], strict=True) if m} == {0.5}
    assert not plain["exported"]
    assert rich["exported"]
    assert "ratios" in rich
    other = {**export_of(record, run.random), "tokens": [1] * length}
    assert page_columns(sequence, 0.5, other) == {**plain, "own": []}
    turns = segments(plain, record["messages"])
    assert [turn["who"] for turn in turns] == ["prompt", "assistant", "tool", "assistant"]
    assert turns[0]["start"] == 0
    assert turns[-1]["end"] == length


@unhurried
@given(
    st.dictionaries(
        st.sampled_from(
            ["prompt_token_ids", "token_ids", "token_logprobs", "token_versions", "loss_mask"]
        ),
        ANYTHING,
    )
)
def test_a_sequence_may_hold_anything(sequence):
    columns = page_columns(sequence, None, sequence)
    turns = segments(columns, [None, {"role": 3}])
    assert sum(turn["end"] - turn["start"] for turn in turns) == len(columns["tokens"])


def test_runs_are_found_by_what_they_write(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "outputs" / name / "rollouts").mkdir(parents=True)
    (tmp_path / "outputs/models/tiny").mkdir(parents=True)
    (tmp_path / "outputs/models/tiny/config.json").write_text("{}")
    (tmp_path / "other/a/rollouts").mkdir(parents=True)
    outputs = tmp_path / "outputs"
    assert set(find_runs([outputs])) == {"a", "b"}
    assert set(find_runs([outputs / "a", tmp_path / "other/a"])) == {"a", "other/a"}
    for folder in (Path("no/such"), outputs / "models", outputs / "models/tiny"):
        with pytest.raises(NotARun, match=str(folder)):
            find_runs([folder])


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (["system", "user", "assistant", "user", "assistant"], "1"),
        (["user", "assistant", "user"], "0"),
        (["user", "user", "assistant"], "1"),
        (["system"], "0"),
        (["assistant", "user", "assistant"], "1"),
        ([], ""),
    ],
)
def test_the_question_is_the_last_thing_that_the_user_said_first(roles, expected):
    messages = [{"role": role, "content": str(i)} for i, role in enumerate(roles)]
    assert question({"messages": messages}) == expected


@settings(unhurried, max_examples=30)
@given(ANYTHING, st.lists(ANYTHING, max_size=4))
def test_any_record_has_a_question_and_any_config_settings(value, messages):
    assert isinstance(question({"messages": messages}), str)
    assert isinstance(question({"messages": value}), str)
    found = settings_of({"a": value})
    assert all(isinstance(text, str) for text in found.values())
    json.dumps(found).encode()


def test_settings_of_a_deep_config_are_cut_off():
    deep: dict = {}
    for _ in range(100):
        deep = {"a": deep}
    [(name, value)] = settings_of(deep).items()
    assert name.count("a") == 12
    assert value.startswith('{"a":')


@pytest.mark.parametrize(
    ("thread", "expected"),
    [
        ("trainer", ("trainer", 0)),
        ("generator 0 (2)", ("generator 0", 1)),
        ("generator 0 (0)", ("generator 0 (0)", 0)),
        ("(2)", ("(2)", 0)),
        ("a (99999999999)", ("a (99999999999)", 0)),
    ],
)
def test_a_thread_is_a_row_of_its_actors_lane(thread, expected):
    assert lane_and_row(thread) == expected
