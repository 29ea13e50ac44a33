"""Per-token streams: declared as columns, and found wherever tokens go."""

import math
import pickle
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from tests.support import episode
from torchtitan_rl.batching.documents import Document
from torchtitan_rl.batching.microbatch import Piece, microbatch, single
from torchtitan_rl.batching.schema import fields, loss_mask, present_fields, truncate
from torchtitan_rl.core.columns import COLUMNS, Column, declare
from torchtitan_rl.core.types import Completion, Episode

NAN = math.nan
OPTIONAL = {
    *("token_logprobs", "token_versions", "ref_logprobs", "routed_experts", "echo_alpha"),
}


def full_episode(**changes):
    """An episode with every optional field; its experts are the tokens' ids, and those plus one."""
    versions = [3] * len(changes.get("token_ids", [4, 5]))
    one = episode(**{"ref_logprobs": [-0.25, -2.0], "token_versions": versions, **changes})
    ids = np.array(one.prompt_token_ids + one.token_ids, dtype=np.uint8)
    echo = ([NAN, 0.5] + [NAN] * (len(ids) - 2)) if len(ids) > 2 else [NAN] * len(ids)
    experts = np.stack([ids, ids + 1], axis=-1)[:, None]
    return replace(one, routed_experts=experts, echo_alpha=echo)


def row_of(episodes):
    """The row of these episodes, whole, one after the other."""
    pieces = [Piece(e, 0, e.length) for e in episodes]
    documents = [Document(e.length) for e in episodes]
    return microbatch(documents, pieces, present_fields(episodes)).streams


def padding_of(episodes):
    """The cell of padding in the grid of these episodes."""
    return microbatch([], [], present_fields(episodes))


def values(stream):
    return pytest.approx(stream.tolist(), nan_ok=True)


@pytest.mark.parametrize(
    ("name", "dtype", "stream", "pad"),
    [
        ("tokens", torch.int64, [1, 2, 3, 4, 5], 0),
        ("loss_mask", torch.bool, [False, False, False, True, True], False),
        ("token_logprobs", torch.float32, [NAN, NAN, NAN, -0.5, -1.0], NAN),
        ("advantage", torch.float32, [0.5] * 5, 0.0),
        ("temperature", torch.float32, [0.7] * 5, 1.0),
        ("weight", torch.float32, [0.25] * 5, 0.0),
        ("token_versions", torch.int32, [-1, -1, -1, 3, 3], -1),
        ("ref_logprobs", torch.float32, [NAN, NAN, NAN, -0.25, -2.0], NAN),
        ("routed_experts", torch.uint8, [[[i, i + 1]] for i in range(1, 6)], [[0, 1]]),
        ("echo_alpha", torch.float32, [NAN, 0.5, NAN, NAN, NAN], NAN),
    ],
)
def test_an_episode_becomes_one_stream_per_field_and_padding_one_value(name, dtype, stream, pad):
    one = full_episode(temperature=0.7, weight=0.25)
    row, padding = single(one), padding_of([one])
    assert row.streams[name].dtype == padding.streams[name].dtype == dtype
    for found, wanted in ((row, stream), (padding, [pad])):
        np.testing.assert_allclose(found.streams[name], wanted, rtol=1e-6)


def test_every_field_of_the_schema_is_in_the_table_above():
    assert [field.name for field in fields()] == [
        "tokens",
        "loss_mask",
        "token_logprobs",
        "advantage",
        "temperature",
        "weight",
        "token_versions",
        "ref_logprobs",
        "routed_experts",
        "echo_alpha",
    ]
    assert {field.name for field in fields() if field.optional} == OPTIONAL


def test_what_a_stream_covers_is_what_the_episode_has_values_for():
    covers = {field.name: field.covers for field in fields()}
    everywhere = {"tokens", "loss_mask", "routed_experts", "echo_alpha"}
    assert {name for name in covers if covers[name] == "tokens"} == everywhere
    assert {name for name in covers if covers[name] == "completion"} == OPTIONAL - everywhere


def test_an_episodes_own_loss_mask_counts():
    mask = [False, True, False, True, False]
    assert single(episode(loss_mask=mask)).streams["loss_mask"].tolist() == mask


@pytest.mark.parametrize(
    ("mask", "echo", "rl", "echoes"),
    [
        # The spec's: token 0 is cleared by the builder, 0.0 echoes, None does not.
        ("FFTT", [NAN, 0.0, 0.25, NAN], "FFFT", "FTTF"),
        ("FFTT", None, "FFTT", "FFFF"),
        ("FFTT", [NAN] * 4, "FFTT", "FFFF"),
        (None, [NAN, 1.0, 1.0, 1.0], "FFFF", "FTTT"),
        (None, [NAN, NAN, -1.0, NAN], "FFFT", "FFTF"),
    ],
)
def test_a_token_that_echoes_is_out_of_rl_whatever_its_weight(mask, echo, rl, echoes):
    cell = single(
        episode(
            prompt_token_ids=[1, 2],
            token_ids=[3, 4],
            loss_mask=[c == "T" for c in mask] if mask else None,
            echo_alpha=echo,
        )
    )
    for found, wanted in ((cell.streams["loss_mask"], rl), (cell.echoes, echoes)):
        assert "".join("FT"[int(trains)] for trains in found) == wanted


def test_episodes_of_a_row_follow_each_other_without_padding():
    short = full_episode(
        prompt_token_ids=[6], token_ids=[], token_logprobs=[], ref_logprobs=[], weight=2.0
    )
    last = full_episode(
        prompt_token_ids=[7], token_ids=[8], token_logprobs=[-3.0], ref_logprobs=[-4.0]
    )
    row = row_of([full_episode(), short, last])
    assert row["tokens"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert row["loss_mask"].tolist() == [False] * 3 + [True] * 2 + [False, False, True]
    assert row["weight"].tolist() == [1.0] * 5 + [2.0] + [1.0] * 2
    assert values(row["token_logprobs"]) == [NAN] * 3 + [-0.5, -1.0, NAN, NAN, -3.0]
    assert values(row["ref_logprobs"]) == [NAN] * 3 + [-0.25, -2.0, NAN, NAN, -4.0]


@pytest.mark.parametrize(("start", "stop"), combinations(range(6), 2))
def test_a_piece_of_an_episode_has_that_piece_of_every_stream(start, stop):
    one = full_episode(loss_mask=[False, True, False, True, False])
    piece = Piece(one, start, stop)
    found = microbatch([Document(stop - start)], [piece], present_fields([one])).streams
    for name, stream in single(one).streams.items():
        wanted = stream[start:stop]
        torch.testing.assert_close(found[name], wanted, rtol=0, atol=0, equal_nan=True)


def test_an_optional_field_that_all_have_is_present():
    present = present_fields([full_episode(), full_episode()])
    assert [field.name for field in present] == [field.name for field in fields()]


def test_an_optional_field_that_none_has_is_absent_from_rows_and_padding():
    episodes = [episode(token_logprobs=None)] * 2
    wanted = {field.name for field in fields()} - OPTIONAL
    assert row_of(episodes).keys() == wanted
    assert padding_of(episodes).streams.keys() == wanted


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize(
    ("changes", "name"),
    [({"token_logprobs": None}, "token_logprobs"), ({"ref_logprobs": None}, "ref_logprobs")],
)
def test_an_optional_field_that_some_have_is_an_error_that_names_an_episode_without(
    at, changes, name
):
    with_and_without = [full_episode(), full_episode()]
    with_and_without.insert(at, full_episode(task="chat", group_id="chat/3", **changes))
    with pytest.raises(ValueError, match=f"'chat', group 'chat/3' has no {name}"):
        present_fields(with_and_without)


def test_an_empty_list_is_not_a_missing_field():
    empty = full_episode(token_ids=[], token_logprobs=[], ref_logprobs=[])
    assert {field.name for field in present_fields([empty, full_episode()])} >= OPTIONAL


def test_the_padding_cell_is_one_token_that_is_not_real_and_does_not_train():
    cell = padding_of([full_episode()])
    assert not cell.real
    assert single(full_episode()).real
    assert cell.tokens == 1
    assert cell.documents == [Document(1)]
    assert not cell.streams["loss_mask"].any()


# ---- columns of one's own ------------------------------------------------------------------------


@pytest.fixture
def declared(monkeypatch):
    """Declares a column until the test is over."""

    def declare_once(name, *args, **kwargs):
        declare(Column(name, *args, **kwargs))
        column = COLUMNS.pop(name)
        monkeypatch.setitem(COLUMNS, name, column)
        return column

    return declare_once


@pytest.mark.parametrize(
    ("column", "given", "stream", "pad", "dtype", "cut"),
    [
        (
            ("price", "float64", -1.0, "tokens"),
            [0.1, 0.2, 0.3, 0.4, 0.5],
            [0.1, 0.2, 0.3, 0.4, 0.5],
            -1.0,
            torch.float64,
            [0.1, 0.2, 0.3, 0.4],
        ),
        (("rating", "int32", -7, "completion"), [8, 9], [-7, -7, -7, 8, 9], -7, torch.int32, [8]),
        (
            ("date", "float32", 0.5, "episode", "batching"),
            2.25,
            [2.25] * 5,
            0.5,
            torch.float32,
            2.25,
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_column_is_declared_in_exactly_one_place(
    declared, column, given, stream, pad, dtype, cut
):
    name = declared(*column).name
    one = episode(**{name: given})
    row, padding = row_of([one, one]), padding_of([one])
    assert row[name].tolist() == stream * 2
    assert row[name].dtype == padding.streams[name].dtype == dtype
    assert padding.streams[name].tolist() == [pad]

    shorter = truncate(one, 4)
    assert getattr(shorter, name) == cut
    assert row_of([shorter])[name].tolist() == stream[:4]

    without = episode(task="chat", group_id="chat/3")
    assert getattr(without, name) is None
    assert name not in padding_of([without]).streams
    with pytest.raises(ValueError, match=f"'chat', group 'chat/3' has no {name}"):
        present_fields([one, without])


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
@pytest.mark.parametrize(("covers", "covered"), [("tokens", 5), ("completion", 2)])
@pytest.mark.parametrize(("layers", "top_k"), [(4, 3), (1, 8), (2, 1)])
def test_an_array_for_each_token_keeps_its_dtype_and_shape_and_is_padded_with_distinct_values(
    declared, dtype, covers, covered, layers, top_k
):
    declared("routed", "uint8", "distinct", covers)
    shape = (covered, layers, top_k)
    chosen = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    one, other = episode(routed=chosen), episode(routed=chosen + dtype(1))
    pad = torch.arange(top_k).expand(layers, top_k)
    prompt = pad.expand(5 - covered, layers, top_k)

    row = row_of([one, other])["routed"]
    padding = padding_of([one]).streams["routed"]
    assert row.dtype == padding.dtype == torch.from_numpy(chosen).dtype
    assert row.shape == (10, layers, top_k)
    expected = torch.from_numpy(chosen).long()
    assert torch.equal(row.long(), torch.cat([prompt, expected, prompt, expected + 1]))
    assert torch.equal(padding.long(), pad.unsqueeze(0))

    shorter = truncate(one, 4)
    assert np.array_equal(shorter.routed, chosen[: covered - 1])
    assert torch.equal(row_of([shorter])["routed"], row[:4])


def test_padding_does_not_share_its_memory():
    stream = COLUMNS["routed_experts"].padding(2, (2, 3))
    stream[0, 0, 0] = 9
    assert stream[1, 0, 0] == stream[0, 1, 0] == 0


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (("token_ids", "int32", 0, "tokens"), "cannot be called 'token_ids'"),
        (("a price", "int32", 0, "tokens"), "must be an identifier; got 'a price'"),
        (("mood", "int32", 0, "episode"), "column 'mood': a generator makes values of tokens"),
        (("echo_alpha", "float32", 0.0, "tokens"), "'echo_alpha' is declared already, and diff"),
    ],
)
def test_a_declaration_that_cannot_work_fails_where_it_stands(column, said):
    with pytest.raises(ValueError, match=said):
        declare(Column(*column))
    assert declare(COLUMNS["echo_alpha"]) is COLUMNS["echo_alpha"]


def test_a_name_that_nobody_has_declared_is_refused():
    with pytest.raises(TypeError, match=r"column 'token_logprob' \(did you mean 'token_logprobs'"):
        Completion(0, 0, [1], "", [2], token_logprob=[-0.5])
    with pytest.raises(TypeError, match="nobody has declared a column 'mood'"):
        episode(mood=[1])
    with pytest.raises(AttributeError, match="no attribute and no column 'mood'"):
        _ = episode().mood


@pytest.mark.parametrize("name", ["reward", "task", "group_id", "advantage"])
def test_an_episode_needs_what_it_is_trained_and_counted_by(name):
    given = {"reward": 0.0, "task": "sums", "group_id": "a", "advantage": 0.5}
    assert Episode(0, [1], [2], **given).temperature == 1.0
    with pytest.raises(TypeError, match=name):
        Episode(0, [1], [2], **{key: value for key, value in given.items() if key != name})


def test_an_episode_is_changed_by_making_another():
    one = episode()
    other = one.with_columns(ref_logprobs=[-1.0, -2.0], token_logprobs=None)
    assert (other.ref_logprobs, other.token_logprobs) == ([-1.0, -2.0], None)
    assert (one.ref_logprobs, one.token_logprobs) == (None, [-0.5, -1.0])
    assert replace(one, advantage=2.0, token_logprobs=None) == one.with_columns(
        advantage=2.0, token_logprobs=None
    )
    assert pickle.loads(pickle.dumps(other)) == other


def test_the_tokens_that_train_are_those_of_the_completion_unless_a_mask_says_otherwise():
    assert loss_mask(episode()) == [False, False, False, True, True]
    assert loss_mask(episode(token_ids=[])) == [False, False, False]
    mask = [False, True, False, False, True]
    assert loss_mask(episode(loss_mask=mask)) == mask


@pytest.mark.parametrize("length", range(3, 6))
def test_a_cut_episode_has_the_first_tokens_of_every_stream(length):
    one = full_episode(loss_mask=[False, True, False, True, False])
    cut = single(truncate(one, length)).streams
    for name, stream in single(one).streams.items():
        torch.testing.assert_close(cut[name], stream[:length], rtol=0, atol=0, equal_nan=True)


def test_a_microbatch_travels_whole_and_can_be_written_to():
    sent = single(full_episode())
    got = pickle.loads(pickle.dumps(sent, protocol=5))
    assert (got.documents, got.real) == (sent.documents, sent.real)
    assert got.streams.keys() == sent.streams.keys()
    for name, stream in sent.streams.items():
        assert got.streams[name].dtype == stream.dtype
        torch.testing.assert_close(got.streams[name], stream, rtol=0, atol=0, equal_nan=True)
    got.streams["advantage"].zero_()
