"""Assignment of items to microbatches within a token budget, all of about the same cost."""

import heapq
from collections.abc import Sequence

EVEN = 0.1
"""Relative difference of the ranks' loads up to which no better assignment is tried."""


def pack(
    sizes: Sequence[int], costs: Sequence[float], *, budget: int, ranks: int
) -> list[list[list[int]]]:
    """Assign items to `[microbatch][rank]`, by index; a list may be empty where items are few.

    Few microbatches come first. Then loads are made as equal as a greedy assignment can: within
    each microbatch, where ranks wait for each other, and per rank in total. No size may exceed the
    budget.

    Example:
        >>> pack([4, 3, 3, 2], [4.0, 3.0, 3.0, 2.0], budget=6, ranks=2)
        [[[0, 3], [1, 2]]]
    """
    if max(sizes, default=0) > budget:
        raise ValueError(f"an item of {max(sizes)} is larger than the budget of {budget}")
    order = sorted(range(len(sizes)), key=lambda i: -costs[i])
    microbatches = max(1, -(-sum(sizes) // (budget * ranks)))
    while (bins := fill_bins(order, sizes, costs, budget, microbatches * ranks)) is None:
        microbatches += 1
    rows = _rows(bins, costs, ranks)
    if _spread(rows, costs) > EVEN:
        other = _ranks_first(order, sizes, costs, budget, microbatches, ranks)
        rows = min(rows, other or rows, key=lambda rows: _spread(rows, costs))
    return rows


def rank_loads(rows: list[list[list[int]]], costs: Sequence[float]) -> list[float]:
    """Total cost of each rank's items."""
    return [sum(costs[i] for row in rows for i in row[rank]) for rank in range(len(rows[0]))]


def _spread(rows: list[list[list[int]]], costs: Sequence[float]) -> float:
    """Difference of the largest and the smallest load of a rank, relative to the largest."""
    loads = rank_loads(rows, costs)
    return 1 - min(loads) / max(max(loads), 1e-9)


def _ranks_first(
    order: Sequence[int],
    sizes: Sequence[int],
    costs: Sequence[float],
    budget: int,
    microbatches: int,
    ranks: int,
) -> list[list[list[int]]] | None:
    """Assign items to ranks, then each rank's items to microbatches: equal totals come first."""
    by_rank = fill_bins(order, sizes, costs, budget * microbatches, ranks) or []
    columns = [fill_bins(items, sizes, costs, budget, microbatches) for items in by_rank]
    if not columns or None in columns:
        return None
    by_cost = [
        sorted(column or [], key=lambda items: -sum(costs[i] for i in items)) for column in columns
    ]
    return [list(row) for row in zip(*by_cost, strict=True)]


def fill_bins(
    order: Sequence[int], sizes: Sequence[int], costs: Sequence[float], budget: int, bins: int
) -> list[list[int]] | None:
    """Items in the given `order`, each in the bin of least cost that has room; None if an item fits
    in no bin."""
    filled: list[list[int]] = [[] for _ in range(bins)]
    room = [budget] * bins
    heap = [(0.0, index) for index in range(bins)]
    for item in order:
        too_full = []
        while heap and room[heap[0][1]] < sizes[item]:
            too_full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, chosen = heap[0]
        filled[chosen].append(item)
        room[chosen] -= sizes[item]
        heapq.heapreplace(heap, (load + costs[item], chosen))
        for entry in too_full:
            heapq.heappush(heap, entry)
    return filled


def _rows(bins: list[list[int]], costs: Sequence[float], ranks: int) -> list[list[list[int]]]:
    """Rows of bins of similar cost; in each row the costliest bin goes to the least loaded rank."""
    cost = {id(items): sum(costs[i] for i in items) for items in bins}
    bins = sorted(bins, key=lambda items: -cost[id(items)])
    loads, rows = [0.0] * ranks, []
    for first in range(0, len(bins), ranks):
        row: list[list[int]] = [[] for _ in range(ranks)]
        by_load = sorted(range(ranks), key=lambda rank: loads[rank])
        for rank, items in zip(by_load, bins[first : first + ranks], strict=True):
            row[rank] = items
            loads[rank] += cost[id(items)]
        rows.append(row)
    return rows
