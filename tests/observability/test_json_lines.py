"""Lines of JSON: anything can be written, files are whole, and a broken line says which it is."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.observability.json_lines import encode, read_lines, write_lines


class Shy:
    def __repr__(self):
        raise KeyError("no")


CYCLE: list = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (math.nan, None),
        ({"a": [1.5, math.inf, -math.inf]}, {"a": [1.5, None, None]}),
        ({(1, 2): math.nan, "seen": True}, {"(1, 2)": None, "seen": True}),
        ({1}, [1]),
        ([10**5000], ["a value of type int that cannot be shown"]),
        ("a\ud800<script>\x00\n\u2028", "a\ud800<script>\x00\n\u2028"),
        ({"a\ud800": {3: math.nan}}, {"a\ud800": {"3": None}}),
        (np.float32(0.5), 0.5),
        (np.array([1.0, np.nan]), [1.0, None]),
        (Shy(), "a value of type Shy that cannot be shown"),
        ({"a\ud800": Shy()}, {"a\ud800": "a value of type Shy that cannot be shown"}),
        (1 + 2j, "(1+2j)"),
    ],
)
def test_whatever_is_written_can_be_read(value, read):
    line = encode(value)
    assert b"\n" not in line
    assert json.loads(line, parse_constant=pytest.fail) == read


def test_what_holds_itself_is_cut_off():
    assert "..." in encode(CYCLE).decode()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(JSON)
def test_json_stays_what_it_is_to_the_last_bit(value):
    assert json.loads(encode(value)) == value


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "new" / "step-000000.jsonl"
    write_lines(path, [{"a": 1}, {"b": math.nan}])
    assert list(read_lines(path)) == [(1, {"a": 1}), (2, {"b": None})]

    def broken():
        yield {"a": 2}
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_lines(path, broken())
    assert next(read_lines(path)) == (1, {"a": 1})


@pytest.mark.parametrize("line", ['{"a": ', "[1]", "", "nonsense"])
def test_a_broken_line_is_named(tmp_path, line):
    path = tmp_path / "step-000003.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=r"step-000003.jsonl, line 2 is broken: "):
        list(read_lines(path))
