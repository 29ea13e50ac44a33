"""The grid of microbatches: nothing lost, nothing changed, the same work for every rank."""

import pickle
from collections import Counter
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import episode
from torchtitan_rl.batching.documents import Document, positions, predecessors, segments
from torchtitan_rl.batching.grid import grid_metrics, make_grid, split_groups
from torchtitan_rl.batching.microbatch import single
from torchtitan_rl.batching.schema import fields, loss_mask, present_fields


def sized(prompt, completion, **changes):
    """An episode of so many tokens."""
    return episode(
        **{
            "prompt_token_ids": list(range(1, prompt + 1)),
            "token_ids": [50 + i for i in range(completion)],
            "token_logprobs": [-0.5] * completion,
            **changes,
        }
    )


@st.composite
def batches(draw):
    """Episodes of a few prompts, each value of them distinct, and a budget that fits each."""
    sampled, with_reference = draw(st.booleans()), draw(st.booleans())
    prompts = draw(
        st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=3)
    )
    episodes = []
    for number in range(1, draw(st.integers(1, 14)) + 1):
        prompt, length = draw(st.sampled_from(prompts)), draw(st.integers(0, 9))
        rest = len(prompt) + length - 1
        mask = [False, *draw(st.lists(st.booleans(), min_size=rest, max_size=rest))]
        logprobs = [-number - i / 16 for i in range(length)]
        episodes.append(
            episode(
                prompt_token_ids=prompt,
                token_ids=[100 * number + i for i in range(length)],
                token_logprobs=logprobs if sampled else None,
                ref_logprobs=[2 * value for value in logprobs] if with_reference else None,
                advantage=float(number),
                temperature=number / 4,
                weight=number / 8,
                group_id=draw(st.sampled_from("ab")),
                loss_mask=draw(st.sampled_from([None, mask])),
            )
        )
    longest = max(e.length for e in episodes)
    return episodes, {
        "dp_degree": draw(st.integers(1, 4)),
        "tokens_per_microbatch": draw(st.integers(longest, 4 * longest)),
        "share_prompts": draw(st.booleans()),
    }


def cells_of(grid):
    return [cell for row in grid.cells for cell in row]


def documents_of(grid):
    return [document for cell in cells_of(grid) if cell.real for document in cell.documents]


def path_to(grid, span, length):
    """Indices in its cell of an episode's tokens, found by going back from its last one."""
    row = segments(grid.cells[span.cell][span.rank].documents)
    before = predecessors(row).tolist()
    path = [span.stop - 1]
    while len(path) < length:
        path.append(before[path[-1]])
    assert positions(row)[path[::-1]].tolist() == list(range(length))
    return path[::-1]


def same(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@settings(deadline=None)
@given(batch=batches())
def test_every_episode_is_in_exactly_one_place_with_its_values_intact(batch):
    episodes, sizes = batch
    grid = make_grid(episodes, **sizes)
    taken = {(i, r): Counter() for i, row in enumerate(grid.cells) for r in range(len(row))}
    for one, span in zip(episodes, grid.spans, strict=True):
        cell = grid.cells[span.cell][span.rank]
        path = path_to(grid, span, one.length)
        prompt = len(one.prompt_token_ids)
        alone = single(one).streams
        assert cell.streams.keys() == alone.keys()
        assert path[prompt:] == list(range(span.start, span.stop))
        for name, stream in cell.streams.items():
            same(stream[span.start : span.stop], alone[name][prompt:])
        for name in ("tokens", "loss_mask"):
            same(cell.streams[name][path], alone[name])
        taken[span.cell, span.rank].update(path)
    for (number, rank), found in taken.items():
        cell = grid.cells[number][rank]
        assert found.keys() == (set(range(cell.tokens)) if cell.real else set())
        if not sizes["share_prompts"]:
            assert set(found.values()) <= {1}
    assert sum(len(e.token_ids) for e in episodes) == sum(
        int((cell.streams["tokens"] >= 100).sum()) for cell in cells_of(grid)
    )


@settings(deadline=None)
@given(batch=batches())
def test_what_the_ranks_return_is_read_back_in_the_order_of_the_episodes(batch):
    episodes, sizes = batch
    grid = make_grid(episodes, **sizes)
    columns = [
        [row[rank].streams["tokens"] * 10 + 1 for row in grid.cells]
        for rank in range(sizes["dp_degree"])
    ]
    assert [values.tolist() for values in grid.read_back(columns)] == [
        [10 * token + 1 for token in e.token_ids] for e in episodes
    ]


@settings(deadline=None)
@given(batch=batches())
def test_every_rank_runs_the_same_number_of_cells_with_the_same_fields_within_the_budget(batch):
    episodes, sizes = batch
    grid = make_grid(episodes, **sizes)
    assert {len(row) for row in grid.cells} == {sizes["dp_degree"]}
    names = {field.name for field in present_fields(episodes)}
    for cell in cells_of(grid):
        assert cell.streams.keys() == names
        assert cell.tokens <= sizes["tokens_per_microbatch"]
        assert {len(stream) for stream in cell.streams.values()} == {cell.tokens}
        assert sum(document.tokens for document in cell.documents) == cell.tokens


@settings(deadline=None)
@given(batch=batches())
def test_counts_are_those_of_the_episodes(batch):
    episodes, sizes = batch
    grid = make_grid(episodes, **sizes)
    assert grid.loss_tokens == sum(sum(loss_mask(e)) for e in episodes)
    assert grid.episode_tokens == sum(e.length for e in episodes)
    assert grid.tokens == sum(cell.tokens for cell in cells_of(grid))
    assert grid.padding_tokens == sum(not cell.real for cell in cells_of(grid))
    shared = sum(d.trunk * (len(d.branches) - 1) for d in documents_of(grid) if d.branches)
    assert grid.tokens - grid.padding_tokens == grid.episode_tokens - shared
    assert bool(shared) <= sizes["share_prompts"]


@pytest.mark.parametrize("share_prompts", [False, True])
def test_hundreds_of_batches_of_lengths_up_to_the_budget(share_prompts):
    random = Random(int(share_prompts))
    for _ in range(200):
        budget, dp_degree = random.choice([4, 16, 64]), random.randint(1, 8)
        prompts = {g: random.randint(1, max(1, budget // 2)) for g in "abc"}
        episodes = []
        for number in range(random.randint(1, 30)):
            group = random.choice("abc")
            length = random.randint(0, budget - prompts[group])
            tokens = [1000 * (number + 1) + i for i in range(length)]
            episodes.append(sized(prompts[group], length, token_ids=tokens, group_id=group))
        grid = make_grid(
            episodes,
            dp_degree=dp_degree,
            tokens_per_microbatch=budget,
            share_prompts=share_prompts,
        )
        everything = [t for cell in cells_of(grid) for t in cell.streams["tokens"].tolist()]
        completions = [t for t in everything if t >= 1000]
        assert sorted(completions) == sorted(t for e in episodes for t in e.token_ids)
        for one, span in zip(episodes, grid.spans, strict=True):
            stream = grid.cells[span.cell][span.rank].streams["tokens"]
            path = path_to(grid, span, one.length)
            assert stream[path].tolist() == one.prompt_token_ids + one.token_ids
        assert all(cell.tokens <= budget for cell in cells_of(grid))
        assert all(any(cell.real for cell in row) for row in grid.cells)


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("dp_degree", range(1, 9))
def test_a_realistic_mix_has_hardly_any_padding_and_level_ranks(dp_degree, share_prompts):
    random = Random(dp_degree)
    episodes = []
    for group in range(32):
        prompt = 20 + int(random.lognormvariate(4, 0.5))
        for _ in range(8):
            length = 1 + min(1500, int(random.lognormvariate(5, 0.8)))
            episodes.append(sized(prompt, length, group_id=str(group)))
    grid = make_grid(
        episodes, dp_degree=dp_degree, tokens_per_microbatch=4096, share_prompts=share_prompts
    )
    cells = cells_of(grid)
    assert grid.padding_share == sum(not cell.real for cell in cells) / len(cells) <= 0.05
    loads = [
        sum(d.tokens + d.visible / (6 * 1024) for row in grid.cells for d in row[rank].documents)
        for rank in range(dp_degree)
    ]
    assert min(loads) >= 0.9 * max(loads)
    assert bool(grid.tokens < grid.episode_tokens) == share_prompts


@pytest.mark.parametrize(
    ("lengths", "dp_degree", "budget", "tokens", "padding"),
    [
        ([4, 4], 1, 8, [[8]], 0),
        ([4, 4], 1, 7, [[4], [4]], 0),
        ([4, 2, 2], 1, 8, [[8]], 0),
        ([2, 4, 4, 2], 2, 8, [[6, 6]], 0),
        ([3], 2, 8, [[3, 1]], 1),
        ([5, 4, 3], 2, 5, [[5, 4], [1, 3]], 1),
        ([1], 4, 1, [[1, 1, 1, 1]], 3),
    ],
)
def test_the_layout_by_table(lengths, dp_degree, budget, tokens, padding):
    episodes = [sized(1, n - 1) for n in lengths]
    grid = make_grid(episodes, dp_degree=dp_degree, tokens_per_microbatch=budget)
    assert [[cell.tokens for cell in row] for row in grid.cells] == tokens
    assert grid.padding_tokens == padding


def test_a_rank_without_an_episode_gets_padding_with_every_field_that_trains_nothing():
    experts = np.zeros((5, 2, 2), np.uint8)
    echo = [float("nan")] * 5
    one = episode(
        ref_logprobs=[-1, -2], token_versions=[0, 0], routed_experts=experts, echo_alpha=echo
    )
    grid = make_grid([one], dp_degree=3, tokens_per_microbatch=8)
    ((real, *paddings),) = grid.cells
    assert real.real
    for padding in paddings:
        assert not padding.real
        assert padding.tokens == 1
        assert padding.documents == [Document(1)]
        assert padding.streams.keys() == {field.name for field in fields()}
        assert not padding.streams["loss_mask"].any()
        assert not padding.echoes.any()
        assert padding.streams["weight"].item() == 0
        assert padding.streams["routed_experts"].tolist() == [[[0, 1], [0, 1]]]


@pytest.mark.parametrize(("hidden_size", "tokens"), [(1, [64, 96]), (10**6, [80, 80])])
def test_attention_weighs_more_in_a_narrow_model(hidden_size, tokens):
    episodes = [sized(32, 32), *[sized(2, 2) for _ in range(24)]]
    grid = make_grid(episodes, dp_degree=2, tokens_per_microbatch=200, hidden_size=hidden_size)
    assert [cell.tokens for cell in grid.cells[0]] == tokens


def test_an_episode_over_the_budget_is_refused_by_name():
    long = sized(3, 6, task="chat", group_id="chat/9")
    with pytest.raises(ValueError, match="tokens_per_microbatch is 8") as error:
        make_grid([episode(), long], dp_degree=1, tokens_per_microbatch=8)
    assert "task 'chat', group 'chat/9' has 9 tokens" in str(error.value)


def test_no_episodes_are_refused():
    with pytest.raises(ValueError, match="no episodes"):
        make_grid([], dp_degree=1, tokens_per_microbatch=8)


def test_the_metrics_of_a_step_are_those_of_all_its_grids():
    first = make_grid([sized(2, 2), sized(2, 2)], dp_degree=2, tokens_per_microbatch=8)
    alone = make_grid([sized(2, 2)], dp_degree=3, tokens_per_microbatch=8)
    both = [sized(2, 2), sized(2, 4)]
    shared = make_grid(both, dp_degree=1, tokens_per_microbatch=8, share_prompts=True)
    assert grid_metrics([first, alone, shared]) == {
        "train/updates": 3,
        "train/tokens": 8 + 4 + 8,
        "padding_share": pytest.approx((0 + 2 / 3 + 0) / 3),
        "shared_share": pytest.approx(2 / 22),
    }


@settings(deadline=None)
@given(batch=batches())
def test_what_the_ranks_are_sent_is_the_grid_and_nothing_twice(batch):
    episodes, sizes = batch
    grid = make_grid(episodes, **sizes)
    assert grid.dp_degree == sizes["dp_degree"]
    sent = [pickle.loads(pickle.dumps(grid.of_rank(r))) for r in range(grid.dp_degree)]
    assert [part.dp_rank for part in sent] == list(range(grid.dp_degree))
    again = [list(row) for row in zip(*(part.cells for part in sent), strict=True)]
    for row, found in zip(grid.cells, again, strict=True):
        for cell, other in zip(row, found, strict=True):
            assert cell.documents == other.documents
            assert (cell.real, cell.tasks, cell.names) == (other.real, other.tasks, other.names)
            assert cell.streams.keys() == other.streams.keys()
            for name, stream in cell.streams.items():
                same(other.streams[name], stream)
    # Losses are divided by the tokens of all ranks, whichever a rank has.
    assert {(part.loss_tokens, part.echo_tokens) for part in sent} == {
        (grid.loss_tokens, grid.echo_tokens)
    }
    assert grid.loss_tokens == sum(
        int(cell.streams["loss_mask"].sum()) for part in sent for cell in part.cells
    )


def test_a_rank_is_sent_as_much_however_many_ranks_there_are():
    sent = {}
    for ranks in (1, 4, 16):
        grid = make_grid([sized(4, 12)] * 3 * ranks, dp_degree=ranks, tokens_per_microbatch=16)
        sent[ranks] = {len(pickle.dumps(grid.of_rank(rank))) for rank in range(ranks)}
    assert max(map(max, sent.values())) - min(map(min, sent.values())) <= 8  # larger numbers


@pytest.mark.parametrize(
    ("groups", "parts", "expected"),
    [
        ("abcde", 2, ["ace", "bd"]),
        ("abcde", 1, ["abcde"]),
        ("aabbcc", 2, ["aacc", "bb"]),
        # A group's episodes need not stand together.
        ("abab", 2, ["aa", "bb"]),
        ("aabb", 3, ["aa", "bb"]),
        ("aaaa", 2, ["aaaa"]),
    ],
)
def test_groups_split_by_table(groups, parts, expected):
    episodes = [episode(group_id=group) for group in groups]
    assert ["".join(e.group_id for e in part) for part in split_groups(episodes, parts)] == expected


@settings(deadline=None)
@given(
    groups=st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=20), parts=st.integers(1, 9)
)
def test_groups_stay_whole_no_part_is_empty_and_every_episode_is_in_one_part(groups, parts):
    episodes = [episode(group_id=g, advantage=float(i)) for i, g in enumerate(groups)]
    split = split_groups(episodes, parts)
    assert len(split) == min(parts, len(set(groups)))
    assert all(split)
    assert sorted(e.advantage for part in split for e in part) == [e.advantage for e in episodes]
    ids = [{e.group_id for e in part} for part in split]
    assert sum(map(len, ids)) == len(set(groups))
    assert max(map(len, ids)) - min(map(len, ids)) <= 1
