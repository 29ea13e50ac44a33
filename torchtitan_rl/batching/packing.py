"""Deal items to microbatches: none over its budget of tokens, all of about the same cost."""

import heapq
from collections.abc import Sequence
from itertools import count


def pack(
    sizes: Sequence[int], costs: Sequence[float], *, budget: int, ranks: int
) -> list[list[list[int]]]:
    """`[microbatch][rank]` lists of items, by index; a list may be empty where items are few.

    As few microbatches as possible, then loads as equal as possible: over the ranks in total, and
    within each microbatch, where ranks wait for each other. No size may be above the budget.

    Example:
        >>> pack([4, 3, 3, 2], [4.0, 3.0, 3.0, 2.0], budget=6, ranks=2)
        [[[0, 3], [1, 2]]]
    """
    order = sorted(range(len(sizes)), key=lambda i: -costs[i])
    fewest = max(1, -(-sum(sizes) // (budget * ranks)))
    for microbatches in count(fewest):
        bins = _deal(order, sizes, costs, budget, microbatches * ranks)
        if bins is not None:
            return _rows(bins, costs, ranks)
    raise AssertionError("unreachable: with a bin for each item, all fit")


def _deal(
    order: Sequence[int], sizes: Sequence[int], costs: Sequence[float], budget: int, bins: int
) -> list[list[int]] | None:
    """Costliest first, each to the bin of least cost that has room; None if one has no bin."""
    dealt: list[list[int]] = [[] for _ in range(bins)]
    room = [budget] * bins
    heap = [(0.0, index) for index in range(bins)]
    for item in order:
        too_full = []
        while heap and room[heap[0][1]] < sizes[item]:
            too_full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, chosen = heap[0]
        dealt[chosen].append(item)
        room[chosen] -= sizes[item]
        heapq.heapreplace(heap, (load + costs[item], chosen))
        for entry in too_full:
            heapq.heappush(heap, entry)
    return dealt


def _rows(bins: list[list[int]], costs: Sequence[float], ranks: int) -> list[list[list[int]]]:
    """Bins of like cost side by side; in each row the costliest goes to the rank with least."""
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
