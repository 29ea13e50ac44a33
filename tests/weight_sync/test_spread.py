"""The controller's orders to relays when hosts fail or trainers are gone; and ranges of bytes."""

import asyncio
import itertools
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.weight_sync import spread as module
from torchtitan_rl.weight_sync.handle import Part, Slot, StaleHandleError, WeightHandle
from torchtitan_rl.weight_sync.memory_file import HEADER_BYTES, ShmLocation
from torchtitan_rl.weight_sync.ranges import Incoming, changed_ranges, merge_slots, total
from torchtitan_rl.weight_sync.relay import SourceError
from torchtitan_rl.weight_sync.spread import spread


class Net:
    """Hosts whose relays are simulated: they get a part when their source has got it."""

    def __init__(self, homes, hosts, *, dead=(), cut=(), hung=(), stale=False):
        self.homes, self.hosts, self.stale = homes, hosts, stale
        self.dead, self.cut, self.hung = dead, cut, hung
        self.orders = []
        self._came = defaultdict(asyncio.Future)

    async def fetch(self, host, order):
        came = self._came[host, order["publisher"], order["attempt"]]
        self.orders.append((host, order["source"]["address"]))
        try:
            await self._fetch(host, order)
        except Exception:
            came.set_result(False)
            raise
        came.set_result(True)
        return [len(host), order["publisher"], order["size"] + HEADER_BYTES, 5]

    async def _fetch(self, host, order):
        source, at_home = order["source"], order["source"]["location"] is not None
        name = source["address"]
        await asyncio.sleep(0)
        if host in self.dead:
            raise ConnectionError(f"{host} is dead")
        if host in self.hung:
            await asyncio.sleep(3600)
        if name in self.dead or (name, host) in self.cut:
            raise SourceError(f"{name} does not answer")
        if at_home:
            assert name == self.homes[order["publisher"]]
            if self.stale:
                raise StaleHandleError("policy version 1 was overwritten")
            return
        try:
            async with asyncio.timeout(0.1):
                done = await asyncio.shield(self._came[name, order["publisher"], source["attempt"]])
        except TimeoutError:
            raise SourceError(f"{name} hangs") from None
        if not done:
            raise SourceError(f"{name} has got nothing itself")

    async def spread(self, **given):
        slot = Slot("w", (4,), (0,), (4,), torch.uint8, 0, 4)
        parts = tuple(
            Part(number, 1, ShmLocation(9, number, HEADER_BYTES + 4, 9), (slot,), (1,))
            for number, _ in enumerate(self.homes)
        )
        names = {*self.homes, *self.hosts}
        relays = {name: {"address": name, "port": 1, "token": name} for name in names}
        handle = WeightHandle(1, "relay", parts)
        return await spread(handle, self.homes, self.hosts, relays, self.fetch, **given)


async def test_each_host_is_ordered_from_the_one_before_and_its_own_part_stays():
    net = Net(["t"], ["t", "a", "b", "c"])
    there = await net.spread()
    assert net.orders == [("a", "t"), ("b", "a"), ("c", "b")]
    assert list(there.handles) == ["t", "a", "b", "c"]
    assert [handle.parts[0].location.pid for handle in there.handles.values()] == [9, 1, 1, 1]
    assert {handle.transport for handle in there.handles.values()} == {"shm"}


async def test_parts_of_ranks_on_several_hosts_have_chains_of_their_own():
    net = Net(["t", "u"], ["t", "u", "a"])
    there = await net.spread()
    assert sorted(net.orders) == [("a", "t"), ("a", "u"), ("t", "u"), ("u", "t")]
    locations = [[p.location.pid for p in there.handles[host].parts] for host in ("t", "u", "a")]
    assert locations == [[9, 1], [1, 9], [1, 1]]


@pytest.mark.parametrize(
    ("failing", "served", "again"),
    [
        ({"dead": ["c"]}, "ab", []),
        ({"dead": ["b"]}, "ac", [("c", "a")]),
        ({"dead": ["a"]}, "bc", [("b", "t"), ("c", "b")]),
        ({"dead": ["a", "b"]}, "c", [("c", "t")]),
        ({"cut": [("a", "b")]}, "abc", [("b", "t"), ("c", "b")]),
        ({"cut": [("t", "a")]}, "bc", [("b", "t"), ("c", "b")]),
        ({"hung": ["b"]}, "ac", [("c", "a")]),
        # Two hosts say that the trainer's is gone: the third is not ordered from there.
        ({"dead": ["t"]}, "", [("b", "t"), ("c", "b")]),
        ({"stale": True}, "", []),
    ],
)
async def test_those_behind_a_host_that_fails_are_ordered_again(
    monkeypatch, failing, served, again
):
    monkeypatch.setattr(module, "_PATIENCE", 0.1)
    net = Net(["t"], ["a", "b", "c"], **failing)
    there = await net.spread(seconds=0.6)
    assert "".join(there.handles) == served
    assert set(there.errors) == set("abc") - set(served)
    assert net.orders[:3] == [("a", "t"), ("b", "a"), ("c", "b")]
    assert net.orders[3:] == again
    if "stale" in failing:
        assert {type(error) for error in there.errors.values()} == {StaleHandleError}
    if "hung" in failing:
        assert "b has not got the weights within 0.6 s" in str(there.errors["b"])


async def test_a_host_that_lacks_one_part_gets_no_handle_and_the_others_do():
    net = Net(["t", "u"], ["a", "b"], cut=[("t", "a"), ("u", "a"), ("t", "b")])
    there = await net.spread()
    assert list(there.handles) == []
    net = Net(["t", "u"], ["a", "b"], cut=[("t", "a")])
    there = await net.spread()
    assert list(there.handles) == ["b"]
    assert isinstance(there.errors["a"], SourceError)


# ---- ranges ------------------------------------------------------------------------------------

SIZE = 64
SLOTS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(0, 4)), max_size=8
)  # gap before it, bytes, changed


def laid_out(drawn):
    slots, end = [], 0
    for gap, nbytes, changed in drawn:
        slots.append((end + gap, nbytes, changed))
        end += gap + nbytes
    return slots


def bytes_in(ranges):
    return {at for first, last in ranges for at in range(first, last)}


@given(SLOTS, st.integers(-1, 4), st.integers(0, 4), st.randoms())
def test_ranges_are_what_has_changed_whatever_is_merged(drawn, after, until, random):
    slots = laid_out(drawn)
    changed = {
        at: number for offset, nbytes, number in slots for at in range(offset, offset + nbytes)
    }
    shuffled = random.sample(slots, len(slots))
    assert merge_slots(shuffled) == merge_slots(slots)
    for gap in (0, 3):
        merged = merge_slots(shuffled, gap=gap)
        ranges = changed_ranges(merged, after=after)
        assert all(first < last for first, last in ranges)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
        wanted = {at for at, number in changed.items() if number > after}
        padding = bytes_in(ranges) - wanted
        assert wanted <= bytes_in(ranges)
        assert not padding & changed.keys()
        assert gap or not padding
        early = changed_ranges(merged, after=after, until=until)
        late = changed_ranges(merged, after=max(after, until))
        assert bytes_in(early) | bytes_in(late) == bytes_in(ranges)
        assert total(early) + total(late) == total(ranges)


@given(SLOTS, st.integers(-1, 4), st.lists(st.integers(1, 9), min_size=60, max_size=60))
def test_bytes_below_the_watermark_are_those_that_were_published(drawn, after, steps):
    """A receiver's memory against the publication, after every byte that came."""
    ranges = changed_ranges(merge_slots(laid_out(drawn)), after=after)
    size = 200
    published = [at + 1 for at in range(size)]
    memory = [0 if at in bytes_in(ranges) else value for at, value in enumerate(published)]
    incoming, reached = Incoming(ranges, size), -1
    for step in steps:
        assert memory[: incoming.valid] == published[: incoming.valid]
        assert incoming.valid > reached  # it goes on
        reached = incoming.valid
        if incoming.space is None:
            break
        first, last = incoming.space
        count = min(step, last - first)
        memory[first : first + count] = published[first : first + count]
        incoming.take(count)
    else:
        return
    assert incoming.valid == size
    assert memory == published
