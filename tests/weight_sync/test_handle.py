"""Handles: merging what ranks have published, and knowing what a reader has to load."""

import itertools
import pickle
import sys
from dataclasses import replace
from math import prod
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.weight_sync.handle import (
    Part,
    Slot,
    WeightHandle,
    WeightSyncError,
    WrongWeightsError,
    merge_handles,
)
from torchtitan_rl.weight_sync.reading import check_model


def slot(name, rows=(0, 4), of=4, dtype=torch.float32):
    first, last = rows
    shape = (last - first, 8)
    return Slot(name, (of, 8), (first, 0), shape, dtype, 0, 32 * (last - first))


def handle(*parts, version=1, number=1, transport="shm", publishers=None, changed=lambda name: 1):
    publishers = publishers or range(len(parts))
    made = (
        Part(p, number, None, tuple(slots), tuple(changed(slot.name) for slot in slots))
        for p, slots in zip(publishers, parts, strict=True)
    )
    return WeightHandle(version, transport, tuple(made))


def test_ranks_that_have_all_of_every_tensor_between_them_merge():
    merged = merge_handles([handle([slot("w", (0, 1)), slot("b")]), handle([slot("w", (1, 4))])])
    assert merged.tensors() == {"w": ((4, 8), torch.float32), "b": ((4, 8), torch.float32)}
    assert len(merged.parts) == 2
    assert merged.nbytes == 2 * 4 * 32
    assert pickle.loads(pickle.dumps(merged)) == merged


@pytest.mark.parametrize(
    ("ranks", "error", "said"),
    [
        ([handle([slot("w")]), handle([], version=2)], WeightSyncError, "version 1.*another 2"),
        ([handle([slot("w")]), handle([], transport="file")], WeightSyncError, "shm.*file"),
        ([handle([slot("w", (0, 3))])], WrongWeightsError, "'w' has 32 elements.*24 of them"),
        ([handle([slot("w")]), handle([slot("w")])], WrongWeightsError, "64 of them"),
        ([handle([slot("w", (0, 2)), slot("w", (1, 3))])], WrongWeightsError, "do not fit: w.0, 0"),
        ([handle([slot("w", (3, 5)), slot("w", (0, 2))])], WrongWeightsError, "do not fit"),
        (
            [handle([slot("w", (0, 2))]), handle([slot("w", (2, 4), of=5)])],
            WrongWeightsError,
            "disagree on shape or dtype of 'w'",
        ),
        (
            [handle([slot("w", (0, 2))]), handle([slot("w", (2, 4), dtype=torch.bfloat16)])],
            WrongWeightsError,
            "disagree on shape or dtype of 'w'",
        ),
    ],
)
def test_ranks_that_do_not_fit_are_named(ranks, error, said):
    with pytest.raises(error, match=said):
        merge_handles(ranks)


def boxed(start, shape, whole=(4, 6)):
    return Slot("w", whole, start, shape, torch.float32, 0, 4 * prod(shape))


PINWHEEL = [
    ((0, 0), (1, 4)),
    ((0, 4), (3, 2)),
    ((3, 2), (1, 4)),
    ((1, 0), (3, 2)),
    ((1, 2), (2, 2)),
]
"""No cut goes through the whole tensor."""


@pytest.mark.parametrize(
    ("boxes", "fits"),
    [
        (PINWHEEL, True),
        ([((0, 0), (4, 6))], True),
        ([((0, 0), (4, 3)), ((0, 3), (2, 3)), ((2, 3), (2, 3))], True),
        ([((0, 0), (2, 6)), ((2, 0), (0, 6)), ((2, 0), (2, 6))], True),  # a rank has no rows
        (PINWHEEL[:-1], False),  # a hole in the middle
        (PINWHEEL[1:], False),  # a corner is missing
        ([*PINWHEEL, ((1, 2), (2, 2))], False),  # the middle twice
        ([*PINWHEEL[:-1], ((1, 2), (1, 2)), ((1, 2), (1, 2))], False),  # as many, one row twice
        ([((0, 0), (4, 6)), ((0, 0), (4, 6))], False),
        ([((0, 0), (2, 6)), ((3, 0), (2, 6))], False),  # as many elements, one row too far
        ([((-1, 0), (2, 6)), ((1, 0), (3, 6))], False),
        ([((0, 0), (2, 3)), ((2, 3), (2, 3))], False),  # they touch at a corner
        ([((0, 0), (3, 6)), ((2, 0), (1, 6))], False),
    ],
)
def test_boxes_fit_by_table(boxes, fits):
    ranks = [handle([boxed(*box)]) for box in boxes]
    if fits:
        assert len(merge_handles(ranks).slots) == len(boxes)
    else:
        with pytest.raises(WrongWeightsError, match=r"'w' has 24 elements.*do not fit"):
            merge_handles(ranks)


@settings(deadline=None)
@given(
    whole=st.lists(st.integers(1, 4), max_size=3).map(tuple),
    cuts=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 7)), max_size=5),
    moved=st.none() | st.tuples(st.integers(0, 7), st.integers(0, 2), st.sampled_from((-1, 1))),
    again=st.none() | st.integers(0, 7),
)
def test_boxes_fit_just_if_each_element_is_in_one_of_them(whole, cuts, moved, again):
    """Boxes cut at random, then perhaps one moved, and one there twice."""
    boxes = [((0,) * len(whole), whole)]
    for dim, at, number in cuts:
        start, shape = boxes[number % len(boxes)]
        if dim < len(whole) and at <= shape[dim]:
            boxes.remove((start, shape))
            boxes.append((start, (*shape[:dim], at, *shape[dim + 1 :])))
            rest = (*start[:dim], start[dim] + at, *start[dim + 1 :])
            boxes.append((rest, (*shape[:dim], shape[dim] - at, *shape[dim + 1 :])))
    if moved and moved[1] < len(whole):
        number, dim, by = moved
        start, shape = boxes.pop(number % len(boxes))
        boxes.append(((*start[:dim], start[dim] + by, *start[dim + 1 :]), shape))
    if again is not None:
        boxes.append(boxes[again % len(boxes)])
    elements = [
        element
        for start, shape in boxes
        for element in itertools.product(
            *(range(a, a + n) for a, n in zip(start, shape, strict=True))
        )
    ]
    fits = sorted(elements) == list(itertools.product(*map(range, whole)))
    try:
        merge_handles([handle([boxed(*box, whole)]) for box in boxes])
    except WrongWeightsError:
        assert not fits
    else:
        assert fits


def many_ranks(count, *, of=None, without=()):
    """Handles of ranks that have a row each of one tensor, and two columns each of another."""
    of = of or count
    return [
        handle(
            [
                Slot("rows", (of, 8), (rank, 0), (1, 8), torch.float32, 0, 32),
                Slot("columns", (4, 2 * of), (0, 2 * rank), (4, 2), torch.float32, 0, 32),
            ]
        )
        for rank in range(count)
        if rank not in without
    ]


def bytecodes(call):
    """Number of Python instructions that a call runs."""
    count = 0

    def trace(frame, event, _argument):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_the_work_of_a_check_grows_as_the_ranks():
    few, many = (bytecodes(lambda ranks=many_ranks(n): merge_handles(ranks)) for n in (16, 128))
    assert many < 8.5 * few


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (many_ranks(1024, without={700}), r"'rows' has 8192 elements.* 8184 of them.*1015 more"),
        (many_ranks(1025, of=1024), r"'rows' has 8192 elements.* 8200 of them"),
        (
            [*many_ranks(1024, without={700}), *many_ranks(8, of=1024)[:1]],
            r"'rows' has 8192 elements.* 8192 of them",
        ),
    ],
)
def test_among_a_thousand_ranks_a_gap_and_an_overlap_are_found(ranks, said):
    assert len(merge_handles(many_ranks(1024)).slots) == 2048
    with pytest.raises(WrongWeightsError, match=said):
        merge_handles(ranks)


def test_the_slots_of_a_rank_are_pickled_by_that_rank_alone(monkeypatch):
    """Not by the controller, for each of its generators."""
    merged = merge_handles([pickle.loads(pickle.dumps(rank)) for rank in many_ranks(3)])
    only_reads = SimpleNamespace(loads=pickle.loads)
    monkeypatch.setattr("torchtitan_rl.weight_sync.handle.pickle", only_reads)
    assert pickle.loads(pickle.dumps(merged)) == merged
    with pytest.raises(AttributeError, match="dumps"):
        pickle.dumps(many_ranks(1))


def test_slots_that_were_checked_are_not_checked_again():
    def published(number, count=64):
        ranks = many_ranks(count, of=64)
        ranks = [replace(r, parts=(replace(r.parts[0], number=number),)) for r in ranks]
        return [pickle.loads(pickle.dumps(rank)) for rank in ranks]

    first = merge_handles(published(1))
    second = published(2)
    once = bytecodes(lambda: merge_handles(second))
    assert bytecodes(lambda: merge_handles(second, last=first)) < once / 2
    assert merge_handles(second, last=first).parts[0].number == 2
    for others in (
        published(3, 63),
        [*published(3, 63), *published(3, 1)],
        published(3)[::-1][:63],
    ):
        with pytest.raises(WrongWeightsError, match="'rows' has 512 elements"):
            merge_handles(others, last=first)


LAYER = "model.layers.3"
TENSORS = [
    "model.embed_tokens.weight",
    *(f"{LAYER}.self_attn.{p}_proj.weight" for p in "qkvo"),
    *(f"{LAYER}.mlp.experts.{e}.up_proj.weight" for e in range(2)),
    f"{LAYER}.mlp.gate.weight",
    f"{LAYER}.input_layernorm.weight",
    "model.layers.33.mlp.up_proj.weight",
    "lm_head.weight",
]


@pytest.mark.parametrize(
    ("changed", "loaded"),
    [
        ([], []),
        (["lm_head.weight"], ["lm_head.weight"]),
        ([f"{LAYER}.self_attn.k_proj.weight"], TENSORS[1:5]),
        ([f"{LAYER}.mlp.experts.1.up_proj.weight"], TENSORS[5:8]),
        ([f"{LAYER}.input_layernorm.weight"], [f"{LAYER}.input_layernorm.weight"]),
        (["model.layers.33.mlp.up_proj.weight"], ["model.layers.33.mlp.up_proj.weight"]),
        (TENSORS, TENSORS),
    ],
)
def test_what_changed_is_loaded_with_what_an_engine_keeps_in_one_piece_with_it(changed, loaded):
    slots = [slot(name) for name in TENSORS]
    served = handle(slots, number=4)
    newer = handle(slots, number=7, changed=lambda name: 6 if name in changed else 3)
    assert newer.changed_since(served) == set(loaded)


@pytest.mark.parametrize(
    "served",
    [
        None,
        handle([slot("w")], number=9),  # going back: what changed since is not known
        handle([slot("w")], number=4, publishers=[99]),  # another trainer's
        handle([slot("w")], [], number=4),  # another number of ranks
    ],
    ids=["nothing", "newer", "another trainer", "more ranks"],
)
def test_who_serves_something_else_loads_everything(served):
    newer = handle([slot("w")], number=7, changed=lambda name: 2)
    assert newer.changed_since(served) == {"w"}


EXPECTED = {"model.norm.weight": (4, 8), "lm_head.weight": (4, 8)}


@pytest.mark.parametrize(
    ("published", "tied", "said"),
    [
        (["model.norm.weight"], False, "lacks 'lm_head.weight'"),
        (["lm_head.weight"], False, "lacks 'model.norm.weight'"),
        (["model.norm.weight", "lm_head.weight", "odd"], True, "has 'odd'"),
    ],
)
def test_a_snapshot_of_another_model_is_refused_by_name(published, tied, said):
    with pytest.raises(WrongWeightsError, match=said):
        check_model(handle([slot(name) for name in published]), EXPECTED, tied=tied)


def test_a_snapshot_of_other_shapes_is_refused_by_name():
    with pytest.raises(WrongWeightsError, match=r"'model.norm.weight' of shape \(5, 8\).*\(4, 8\)"):
        check_model(handle([slot("model.norm.weight", of=5)]), EXPECTED, tied=True)


def test_weights_that_are_no_numbers_with_a_point_are_refused_by_name():
    counted = slot("model.norm.weight", dtype=torch.int8)
    with pytest.raises(WrongWeightsError, match=r"'model.norm.weight' as torch.int8"):
        check_model(handle([counted]), EXPECTED, tied=True)


@pytest.mark.parametrize("published", [["model.norm.weight"], [*EXPECTED]])
def test_a_tied_output_layer_may_be_there_or_not(published):
    check_model(handle([slot(name) for name in published]), EXPECTED, tied=True)
