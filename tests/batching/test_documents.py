"""Documents in a row: positions, predecessors and visibility, as a plain matrix says them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.batching.documents import (
    Document,
    positions,
    predecessors,
    segment_ids,
    segments,
)

documents = st.builds(
    Document,
    st.integers(1, 6),
    st.lists(st.integers(1, 4), max_size=4).map(tuple),
)
rows = st.lists(documents, min_size=1, max_size=5)


def tokens_of(row):
    """For each token: its document, its branch (0 for the trunk), its position."""
    return [
        (number, branch, first + offset)
        for number, document in enumerate(row)
        for branch, length in enumerate((document.trunk, *document.branches))
        for first in [document.trunk if branch else 0]
        for offset in range(length)
    ]


def sees(one, other):
    """Whether token `one` sees token `other`."""
    same_path = other[1] in (0, one[1])
    return one[0] == other[0] and same_path and other[2] <= one[2]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([Document(1)], {"positions": [0], "predecessors": [None], "segment_ids": [0]}),
        (
            [Document(3), Document(2)],
            {
                "positions": [0, 1, 2, 0, 1],
                "predecessors": [None, 0, 1, None, 3],
                "segment_ids": [0, 0, 0, 1, 1],
            },
        ),
        (
            [Document(2, (2, 1))],
            {
                "positions": [0, 1, 2, 3, 2],
                "predecessors": [None, 0, 1, 2, 1],
                "segment_ids": [0, 0, 1, 1, 2],
            },
        ),
        (
            [Document(1), Document(1, (1, 2)), Document(2)],
            {
                "positions": [0, 0, 1, 1, 2, 0, 1],
                "predecessors": [None, None, 1, 1, 3, None, 5],
                "segment_ids": [0, 1, 2, 3, 3, 4, 4],
            },
        ),
    ],
)
def test_rows_by_table(row, expected):
    found = segments(row)
    assert positions(found).tolist() == expected["positions"]
    assert segment_ids(found).tolist() == expected["segment_ids"]
    before = predecessors(found).tolist()
    assert len(before) == len(expected["predecessors"])
    for got, wanted in zip(before, expected["predecessors"], strict=True):
        assert wanted is None or got == wanted


@pytest.mark.parametrize(
    ("document", "tokens", "visible"),
    [
        (Document(1), 1, 1),
        (Document(4), 4, 10),
        (Document(3, (2, 4)), 9, 6 + (2 * 3 + 3) + (4 * 3 + 10)),
        (Document(2, (1, 1, 1)), 5, 3 + 3 * 3),
    ],
)
def test_sizes_and_costs_by_table(document, tokens, visible):
    assert (document.tokens, document.visible) == (tokens, visible)


def test_segments_lie_one_after_the_other_and_branches_know_their_trunk():
    found = segments([Document(4), Document(3, (2, 1)), Document(1)])
    assert [(s.start, s.stop) for s in found] == [(0, 4), (4, 7), (7, 9), (9, 10), (10, 11)]
    assert [s.trunk and (s.trunk.start, s.trunk.stop) for s in found] == [
        None,
        None,
        (4, 7),
        (4, 7),
        None,
    ]
    assert [s.first_position for s in found] == [0, 0, 3, 3, 0]


@settings(deadline=None)
@given(row=rows)
def test_segments_are_the_runs_of_tokens_of_one_trunk_or_branch(row):
    found = segments(row)
    tokens = tokens_of(row)
    runs = sorted({token[:2] for token in tokens})
    assert [found[i] for i in segment_ids(found)] == [found[runs.index(t[:2])] for t in tokens]
    for number, segment in enumerate(found):
        inside = [i for i, token in enumerate(tokens) if token[:2] == runs[number]]
        assert inside == list(range(segment.start, segment.stop))


@settings(deadline=None)
@given(row=rows)
def test_positions_are_those_of_each_path_through_its_document(row):
    assert positions(segments(row)).tolist() == [position for _, _, position in tokens_of(row)]


@settings(deadline=None)
@given(row=rows)
def test_the_predecessor_is_the_visible_token_one_position_before(row):
    tokens = tokens_of(row)
    before = predecessors(segments(row)).tolist()
    assert len(before) == len(tokens)
    for token, found in zip(tokens, before, strict=True):
        wanted = [i for i, t in enumerate(tokens) if sees(token, t) and t[2] == token[2] - 1]
        # The first token of a trunk has none, and what stands there is an index all the same.
        assert wanted == ([found] if token[2] else [])
        assert 0 <= found < len(tokens)


@settings(deadline=None)
@given(row=rows)
def test_what_a_document_costs_is_the_count_of_the_visibility_matrix(row):
    tokens = tokens_of(row)
    assert sum(d.tokens for d in row) == len(tokens)
    assert sum(d.visible for d in row) == sum(sees(a, b) for a in tokens for b in tokens)
