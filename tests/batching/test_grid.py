"""The grid of microbatches: nothing lost, nothing changed, the same work for every rank."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import episode
from torchtitan_rl.batching.grid import deal_groups, make_grid
from torchtitan_rl.batching.schema import FIELDS, present_fields


@st.composite
def batches(draw):
    """Episodes with distinct advantages to know them by, ranks, and a budget that fits each."""
    sampled, with_reference = draw(st.booleans()), draw(st.booleans())
    episodes = []
    for number in range(1, draw(st.integers(1, 14)) + 1):
        prompt = draw(st.lists(st.integers(0, 99), min_size=1, max_size=6))
        tokens = draw(st.lists(st.integers(0, 99), max_size=9))
        rest = len(prompt + tokens) - 1
        mask = [False, *draw(st.lists(st.booleans(), min_size=rest, max_size=rest))]
        episodes.append(
            episode(
                prompt_token_ids=prompt,
                token_ids=tokens,
                token_logprobs=[-0.25 * i for i in range(len(tokens))] if sampled else None,
                ref_logprobs=[-0.5 * i for i in range(len(tokens))] if with_reference else None,
                advantage=float(number),
                temperature=number / 4,
                weight=number / 8,
                loss_mask=draw(st.sampled_from([None, mask])),
            )
        )
    longest = max(e.length for e in episodes)
    return episodes, {
        "dp_degree": draw(st.integers(1, 4)),
        "tokens_per_microbatch": draw(st.integers(longest, 4 * longest)),
    }


def cells_of(grid):
    return [cell for row in grid.cells for cell in row]


def rows_of(grid):
    """Every row of every cell as {field: list}, the all-padding ones left out."""
    return [
        {name: tensor[row] for name, tensor in cell.items()}
        for cell in cells_of(grid)
        for row in range(len(cell["tokens"]))
        if cell["advantages"][row, 0] != 0
    ]


@settings(deadline=None)
@given(batch=batches())
def test_every_episode_is_in_exactly_one_row_with_its_values_intact(batch):
    episodes, sizes = batch
    rows = rows_of(make_grid(episodes, **sizes))
    assert len(rows) == len(episodes)
    by_advantage = {row["advantages"][0].item(): row for row in rows}
    fields = present_fields(episodes)
    for one in episodes:
        row = by_advantage[one.advantage]
        assert row.keys() == {field.name for field in fields}
        for field in fields:
            width = len(row[field.name])
            expected = [*field.of(one), *[field.pad] * (width - one.length)]
            wanted = torch.tensor(expected, dtype=field.dtype)
            torch.testing.assert_close(row[field.name], wanted, rtol=0, atol=0, equal_nan=True)


@settings(deadline=None)
@given(batch=batches())
def test_origins_say_which_episode_each_row_is(batch):
    episodes, sizes = batch
    grid = make_grid(episodes, **sizes)
    for cells, origins in zip(grid.cells, grid.origins, strict=True):
        for cell, origin in zip(cells, origins, strict=True):
            # An all-padding cell has one row, of advantage 0, and no origin.
            expected = [episodes[index].advantage for index in origin] or [0.0]
            assert cell["advantages"][:, 0].tolist() == expected


@settings(deadline=None)
@given(batch=batches())
def test_what_the_ranks_return_is_read_back_in_the_order_of_the_episodes(batch):
    episodes, sizes = batch
    grid = make_grid(episodes, **sizes)
    columns = [
        [row[rank]["tokens"] * 10 + 1 for row in grid.cells] for rank in range(sizes["dp_degree"])
    ]
    rows = grid.read_back(columns)
    assert [row[: e.length].tolist() for e, row in zip(episodes, rows, strict=True)] == [
        [10 * token + 1 for token in e.prompt_token_ids + e.token_ids] for e in episodes
    ]


@settings(deadline=None)
@given(batch=batches())
def test_every_rank_runs_the_same_number_of_cells_with_the_same_fields(batch):
    episodes, sizes = batch
    grid = make_grid(episodes, **sizes)
    assert {len(row) for row in grid.cells} == {sizes["dp_degree"]}
    assert len({frozenset(cell) for cell in cells_of(grid)}) == 1
    assert all(len({stream.shape for stream in cell.values()}) == 1 for cell in cells_of(grid))


@settings(deadline=None)
@given(batch=batches())
def test_no_cell_exceeds_the_budget(batch):
    episodes, sizes = batch
    for cell in cells_of(make_grid(episodes, **sizes)):
        assert cell["tokens"].numel() <= sizes["tokens_per_microbatch"]


@settings(deadline=None)
@given(batch=batches())
def test_counts_are_those_of_the_episodes(batch):
    episodes, sizes = batch
    grid = make_grid(episodes, **sizes)
    assert grid.loss_tokens == sum(
        len(e.token_ids) if e.loss_mask is None else sum(e.loss_mask) for e in episodes
    )
    assert grid.real_tokens == sum(e.length for e in episodes)
    total = sum(cell["tokens"].numel() for cell in cells_of(grid))
    assert grid.padding_share == pytest.approx((total - grid.real_tokens) / total)
    assert 0 <= grid.padding_share < 1


@settings(deadline=None)
@given(batch=batches())
def test_no_rank_has_more_than_one_episodes_worth_of_work_above_another(batch):
    episodes, sizes = batch
    grid = make_grid(episodes, **sizes)
    length = {e.advantage: e.length for e in episodes}
    work = [0] * sizes["dp_degree"]
    for row in grid.cells:
        for rank, cell in enumerate(row):
            work[rank] += sum(length.get(a, 0) for a in cell["advantages"][:, 0].tolist())
    assert max(work) - min(work) <= max(length.values())


@pytest.mark.parametrize(
    ("lengths", "dp_degree", "budget", "shapes", "padding_share"),
    [
        ([4, 4], 1, 8, [[(2, 4)]], 0),
        ([4, 4], 1, 7, [[(1, 4)], [(1, 4)]], 0),
        ([4, 2, 2], 1, 8, [[(2, 4)], [(1, 2)]], 0.2),
        ([2, 4, 4, 2], 2, 8, [[(2, 4), (2, 4)]], 0.25),
        ([3], 2, 8, [[(1, 3), (1, 1)]], 0.25),
        ([5, 4, 3], 2, 5, [[(1, 5), (1, 4)], [(1, 3), (1, 1)]], 1 / 13),
    ],
)
def test_the_layout_by_table(lengths, dp_degree, budget, shapes, padding_share):
    episodes = [
        episode(prompt_token_ids=[1], token_ids=[2] * (n - 1), token_logprobs=[-1.0] * (n - 1))
        for n in lengths
    ]
    grid = make_grid(episodes, dp_degree=dp_degree, tokens_per_microbatch=budget)
    assert [[tuple(cell["tokens"].shape) for cell in row] for row in grid.cells] == shapes
    assert grid.padding_share == pytest.approx(padding_share)


def test_a_rank_without_an_episode_gets_padding_with_every_field_that_trains_nothing():
    grid = make_grid([episode(ref_logprobs=[-1, -2])], dp_degree=3, tokens_per_microbatch=8)
    for padding in grid.cells[0][1:]:
        assert padding.keys() == {field.name for field in FIELDS}
        assert not padding["loss_mask"].any()
        assert padding["weights"].item() == 0


def test_an_episode_over_the_budget_is_refused_by_name():
    long = episode(task="chat", group_id="chat/9", token_ids=[4] * 6, token_logprobs=[-1.0] * 6)
    with pytest.raises(ValueError, match="tokens_per_microbatch is 8") as error:
        make_grid([episode(), long], dp_degree=1, tokens_per_microbatch=8)
    assert "task 'chat', group 'chat/9' has 9 tokens" in str(error.value)


def test_no_episodes_are_refused():
    with pytest.raises(ValueError, match="no episodes"):
        make_grid([], dp_degree=1, tokens_per_microbatch=8)


@pytest.mark.parametrize(
    ("groups", "parts", "dealt"),
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
def test_groups_dealt_by_table(groups, parts, dealt):
    episodes = [episode(group_id=group) for group in groups]
    assert ["".join(e.group_id for e in part) for part in deal_groups(episodes, parts)] == dealt


@settings(deadline=None)
@given(
    groups=st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=20), parts=st.integers(1, 9)
)
def test_groups_stay_whole_no_part_is_empty_and_every_episode_is_dealt_once(groups, parts):
    episodes = [episode(group_id=g, advantage=float(i)) for i, g in enumerate(groups)]
    hands = deal_groups(episodes, parts)
    assert len(hands) == min(parts, len(set(groups)))
    assert all(hands)
    assert sorted(e.advantage for hand in hands for e in hand) == [e.advantage for e in episodes]
    ids = [{e.group_id for e in hand} for hand in hands]
    assert sum(map(len, ids)) == len(set(groups))
    assert max(map(len, ids)) - min(map(len, ids)) <= 1
