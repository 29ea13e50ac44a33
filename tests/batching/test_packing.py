"""Items assigned to microbatches: each once, none over the budget, the same load for every rank."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.batching.packing import pack


def first_fit_decreasing(sizes, budget):
    """How many bins the textbook needs."""
    rooms = []
    for size in sorted(sizes, reverse=True):
        fits = [i for i, room in enumerate(rooms) if room >= size]
        if fits:
            rooms[fits[0]] -= size
        else:
            rooms.append(budget - size)
    return len(rooms)


def cost_of(size, hidden_size):
    """What an episode of this length costs: as the grid has it."""
    return size + size * (size + 1) / 2 / (6 * hidden_size)


def loads_of(packed, costs):
    """What each rank has to do in all."""
    return [
        sum(costs[i] for items in column for i in items) for column in zip(*packed, strict=True)
    ]


def fuzzed(count, seed):
    """Batches as (sizes, costs, budget, ranks): lengths 1 to the budget, of three kinds."""
    random = Random(seed)
    for number in range(count):
        budget, ranks = random.choice([8, 50, 512, 4096]), random.randint(1, 8)
        draw = [
            lambda b=budget: random.randint(1, b),
            lambda b=budget: random.randint(1, b // 8),
            lambda b=budget: min(b, 1 + int(random.lognormvariate(0, 0.8) * b / 6)),
        ][number % 3]
        sizes = [draw() for _ in range(random.randint(1, 120))]
        hidden_size = random.choice([16, 1024])
        yield sizes, [cost_of(size, hidden_size) for size in sizes], budget, ranks


@st.composite
def batches(draw):
    """Items whose costs may have nothing to do with their sizes."""
    budget = draw(st.integers(1, 30))
    sizes = draw(st.lists(st.integers(1, budget), min_size=1, max_size=30))
    costs = draw(st.lists(st.integers(1, 99), min_size=len(sizes), max_size=len(sizes)))
    return sizes, [float(cost) for cost in costs], budget, draw(st.integers(1, 5))


@pytest.mark.parametrize(
    ("sizes", "budget", "ranks", "packed"),
    [
        ([4], 4, 1, [[[0]]]),
        ([4], 4, 3, [[[0], [], []]]),
        ([4, 3, 3, 2], 6, 2, [[[0, 3], [1, 2]]]),
        ([4, 4], 8, 1, [[[0, 1]]]),
        ([4, 4], 7, 1, [[[0]], [[1]]]),
        ([1, 5, 5], 5, 1, [[[1]], [[2]], [[0]]]),
        # In the second row the costlier goes to the rank that had the cheaper in the first.
        ([6, 5, 4, 3], 6, 2, [[[0], [1]], [[3], [2]]]),
    ],
)
def test_packing_by_table(sizes, budget, ranks, packed):
    assert pack(sizes, [float(size) for size in sizes], budget=budget, ranks=ranks) == packed


@settings(deadline=None)
@given(batch=batches())
def test_every_item_is_assigned_once_no_bin_is_too_full_and_rows_are_as_wide_as_the_ranks(batch):
    sizes, costs, budget, ranks = batch
    packed = pack(sizes, costs, budget=budget, ranks=ranks)
    assert sorted(i for row in packed for items in row for i in items) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in items) <= budget for row in packed for items in row)
    assert {len(row) for row in packed} == {ranks}
    assert all(any(row) for row in packed), "a row of nothing but padding"


def test_hundreds_of_batches_are_packed_whole_in_few_microbatches_to_ranks_that_are_level():
    for sizes, costs, budget, ranks in fuzzed(600, seed=0):
        packed = pack(sizes, costs, budget=budget, ranks=ranks)
        assert sorted(i for row in packed for items in row for i in items) == [*range(len(sizes))]
        assert all(sum(sizes[i] for i in items) <= budget for row in packed for items in row)

        # Levelling may cost a microbatch over packing as tightly as the textbook, or one in five.
        textbook = -(-first_fit_decreasing(sizes, budget) // ranks)
        assert len(packed) <= max(textbook + 1, 1.2 * textbook)

        # No rank, and no cell of a row, is above another by more than one item.
        loads = loads_of(packed, costs)
        slack = max(costs) * (1 + 1e-9)
        assert max(loads) - min(loads) <= slack
        for row in packed:
            cells = [sum(costs[i] for i in items) for items in row]
            assert max(cells) - min(cells) <= slack


def test_ranks_are_within_a_tenth_of_each_other_where_no_item_is_large_against_a_ranks_load():
    level = 0
    for sizes, costs, budget, ranks in fuzzed(900, seed=1):
        loads = loads_of(pack(sizes, costs, budget=budget, ranks=ranks), costs)
        # With an item of more than a tenth of a load, no split into tenths may exist.
        if max(costs) <= 0.1 * sum(costs) / ranks:
            level += 1
            assert min(loads) >= 0.9 * max(loads)
    assert level > 200  # that was not nothing


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_are_level_on_a_batch_of_episodes_as_they_are(ranks):
    for seed in range(20):
        random = Random(seed)
        sizes = [min(4096, 1 + int(random.lognormvariate(6, 0.7))) for _ in range(512)]
        costs = [cost_of(size, 1024) for size in sizes]
        packed = pack(sizes, costs, budget=16384, ranks=ranks)
        loads = loads_of(packed, costs)
        assert min(loads) >= 0.98 * max(loads)
        assert len(packed) == -(-sum(sizes) // (16384 * ranks))


@settings(deadline=None)
@given(
    count=st.integers(1, 40), size=st.integers(1, 9), fit=st.integers(1, 5), ranks=st.integers(1, 6)
)
def test_equal_items_are_split_as_evenly_as_they_can_be_in_as_few_microbatches(
    count, size, fit, ranks
):
    packed = pack([size] * count, [1.0] * count, budget=fit * size + size - 1, ranks=ranks)
    assert len(packed) == -(-count // (fit * ranks))
    loads = loads_of(packed, [1.0] * count)
    assert max(loads) - min(loads) <= 1


def test_ranks_are_level_where_equal_cells_would_not_make_them_so():
    costs = [4.0, 2.0, 2.0, 1.0, 1.0]
    packed = pack([4, 2, 2, 1, 1], costs, budget=4, ranks=2)
    assert len(packed) == 2
    assert loads_of(packed, costs) == [5.0, 5.0]


def test_an_item_over_the_budget_is_refused():
    with pytest.raises(ValueError, match="an item of 9 is larger than the budget of 8"):
        pack([1, 9], [1.0, 9.0], budget=8, ranks=1)


def test_the_same_batch_is_dealt_the_same_way_again():
    for sizes, costs, budget, ranks in fuzzed(20, seed=2):
        first = pack(sizes, costs, budget=budget, ranks=ranks)
        assert pack(sizes, costs, budget=budget, ranks=ranks) == first
