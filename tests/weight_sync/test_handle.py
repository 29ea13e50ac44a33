"""Handles: merging what ranks have published, and knowing what a reader has to load."""

import pickle

import pytest
import torch

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
