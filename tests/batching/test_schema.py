"""Per-token streams: declared on the episode, and found wherever tokens go."""

import math
import pickle
from dataclasses import dataclass, fields, replace
from itertools import combinations
from typing import Annotated, Any

import numpy as np
import pytest
import torch

from tests.support import episode
from torchtitan_rl.batching.documents import Document
from torchtitan_rl.batching.microbatch import Piece, microbatch, single
from torchtitan_rl.batching.schema import (
    FIELDS,
    loss_mask,
    present_fields,
    read_fields,
    truncate,
)
from torchtitan_rl.core.types import Episode, PerToken

NAN = math.nan
OPTIONAL = {
    *("generator_logprobs", "token_versions", "ref_logprobs", "routed_experts", "echo_alpha"),
}


def full_episode(**changes):
    """An episode with every optional field; its experts are the tokens' ids, and those plus one."""
    versions = [3] * len(changes.get("token_ids", [4, 5]))
    one = episode(**{"ref_logprobs": [-0.25, -2.0], "token_versions": versions, **changes})
    ids = np.array(one.prompt_token_ids + one.token_ids, dtype=np.uint8)
    echo = ([NAN, 0.5] + [NAN] * (len(ids) - 2)) if len(ids) > 2 else [NAN] * len(ids)
    experts = np.stack([ids, ids + 1], axis=-1)[:, None]
    return replace(one, routed_experts=experts, echo_alpha=echo)


def row_of(episodes, declared=FIELDS):
    """The row of these episodes, whole, one after the other."""
    pieces = [Piece(e, 0, e.length) for e in episodes]
    documents = [Document(e.length) for e in episodes]
    return microbatch(documents, pieces, present_fields(episodes, declared)).streams


def padding_of(episodes, declared=FIELDS):
    """The cell of padding in the grid of these episodes."""
    return microbatch([], [], present_fields(episodes, declared))


def values(stream):
    return pytest.approx(stream.tolist(), nan_ok=True)


@pytest.mark.parametrize(
    ("name", "dtype", "stream", "pad"),
    [
        ("tokens", torch.int64, [1, 2, 3, 4, 5], 0),
        ("loss_mask", torch.bool, [False, False, False, True, True], False),
        ("generator_logprobs", torch.float32, [NAN, NAN, NAN, -0.5, -1.0], NAN),
        ("advantages", torch.float32, [0.5] * 5, 0.0),
        ("temperatures", torch.float32, [0.7] * 5, 1.0),
        ("weights", torch.float32, [0.25] * 5, 0.0),
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
    assert [field.name for field in FIELDS] == [
        "tokens",
        "loss_mask",
        "generator_logprobs",
        "advantages",
        "temperatures",
        "weights",
        "token_versions",
        "ref_logprobs",
        "routed_experts",
        "echo_alpha",
    ]
    assert {field.name for field in FIELDS if field.optional} == OPTIONAL


def test_what_a_stream_covers_is_what_the_episode_has_values_for():
    covers = {field.name: field.covers for field in FIELDS}
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
    assert row["weights"].tolist() == [1.0] * 5 + [2.0] + [1.0] * 2
    assert values(row["generator_logprobs"]) == [NAN] * 3 + [-0.5, -1.0, NAN, NAN, -3.0]
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
    assert [field.name for field in present] == [field.name for field in FIELDS]


def test_an_optional_field_that_none_has_is_absent_from_rows_and_padding():
    episodes = [episode(token_logprobs=None)] * 2
    wanted = {field.name for field in FIELDS} - OPTIONAL
    assert row_of(episodes).keys() == wanted
    assert padding_of(episodes).streams.keys() == wanted


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize(
    ("changes", "name"),
    [({"token_logprobs": None}, "generator_logprobs"), ({"ref_logprobs": None}, "ref_logprobs")],
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


def test_a_declaration_without_a_pad_fails_where_it_stands():
    with pytest.raises(TypeError, match="pad"):

        @dataclass
        class _Unpadded(Episode):
            prices: Annotated[
                list[float] | None,
                PerToken("prices", "float32", covers="tokens"),
            ] = None


# A field is added in exactly one place: these three add one each, and nothing else.


@dataclass(slots=True)
class Priced(Episode):
    prices: Annotated[list[float] | None, PerToken("price", "float64", -1.0, "tokens")] = None


@dataclass(slots=True)
class Rated(Episode):
    ratings: Annotated[list[int] | None, PerToken("rating", "int32", -7, "completion")] = None


@dataclass(slots=True)
class Dated(Episode):
    date: Annotated[float | None, PerToken("dates", "float32", 0.5, "episode")] = None


def become(kind, one, **more):
    """The same episode, of a type that declares more."""
    return kind(**{field.name: getattr(one, field.name) for field in fields(one)}, **more)


@pytest.mark.parametrize(
    ("kind", "attribute", "given", "stream", "pad", "dtype", "cut"),
    [
        (
            Priced,
            "prices",
            [0.1, 0.2, 0.3, 0.4, 0.5],
            [0.1, 0.2, 0.3, 0.4, 0.5],
            -1.0,
            torch.float64,
            [0.1, 0.2, 0.3, 0.4],
        ),
        (Rated, "ratings", [8, 9], [-7, -7, -7, 8, 9], -7, torch.int32, [8]),
        (Dated, "date", 2.25, [2.25] * 5, 0.5, torch.float32, 2.25),
    ],
)
def test_a_new_optional_field_is_added_in_exactly_one_place(
    kind, attribute, given, stream, pad, dtype, cut
):
    declared = read_fields(kind)
    (new,) = [field for field in declared if field.name not in {old.name for old in FIELDS}]
    assert [field.name for field in declared[:-1]] == [field.name for field in FIELDS]
    assert new.optional

    one = become(kind, episode(), **{attribute: given})
    row, padding = row_of([one, one], declared), padding_of([one], declared)
    assert row[new.name].tolist() == stream * 2
    assert row[new.name].dtype == padding.streams[new.name].dtype == dtype
    assert padding.streams[new.name].tolist() == [pad]

    shorter = truncate(one, 4, declared)
    assert getattr(shorter, attribute) == cut
    assert row_of([shorter], declared)[new.name].tolist() == stream[:4]

    without = become(kind, episode(task="chat", group_id="chat/3"))
    assert new.name not in padding_of([without], declared).streams
    with pytest.raises(ValueError, match=f"'chat', group 'chat/3' has no {new.name}"):
        present_fields([one, without], declared)


@dataclass(slots=True)
class Routed(Episode):
    experts: Annotated[Any | None, PerToken("routed", "uint8", "distinct", "tokens")] = None


@dataclass(slots=True)
class RoutedCompletion(Episode):
    experts: Annotated[Any | None, PerToken("routed", "uint8", "distinct", "completion")] = None


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
@pytest.mark.parametrize(("kind", "covered"), [(Routed, 5), (RoutedCompletion, 2)])
@pytest.mark.parametrize(("layers", "top_k"), [(4, 3), (1, 8), (2, 1)])
def test_an_array_for_each_token_keeps_its_dtype_and_shape_and_is_padded_with_distinct_values(
    dtype, kind, covered, layers, top_k
):
    declared = read_fields(kind)
    shape = (covered, layers, top_k)
    chosen = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    one = become(kind, episode(), experts=chosen)
    other = become(kind, episode(), experts=chosen + dtype(1))
    pad = torch.arange(top_k).expand(layers, top_k)
    prompt = pad.expand(5 - covered, layers, top_k)

    row = row_of([one, other], declared)["routed"]
    padding = padding_of([one], declared).streams["routed"]
    assert row.dtype == padding.dtype == torch.from_numpy(chosen).dtype
    assert row.shape == (10, layers, top_k)
    expected = torch.from_numpy(chosen).long()
    assert torch.equal(row.long(), torch.cat([prompt, expected, prompt, expected + 1]))
    assert torch.equal(padding.long(), pad.unsqueeze(0))

    shorter = truncate(one, 4, declared)
    assert np.array_equal(shorter.experts, chosen[: covered - 1])
    assert torch.equal(row_of([shorter], declared)["routed"], row[:4])


def test_padding_does_not_share_its_memory():
    (routed,) = [f for f in read_fields(Routed) if f.name == "routed"]
    stream = present_fields(
        [become(Routed, episode(), experts=np.zeros((5, 2, 3), np.uint8))], [routed]
    )[0].padding(2)
    stream[0, 0, 0] = 9
    assert stream[1, 0, 0] == stream[0, 1, 0] == 0


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
    got.streams["advantages"].zero_()
