"""The controller's half of `relay`: orders to the relays of all hosts, and what to do when one
fails.

Hosts form a chain for each trainer rank's part: the first gets it from the rank's host, each other
one from the host before it. All get their orders at once, and bytes are handed on as they come. If
a host fails, the one behind it is ordered again, from the nearest host before both, and the chain
goes on from there.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

from torchtitan_rl.core.waiting import together
from torchtitan_rl.weight_sync.handle import (
    Part,
    StaleHandleError,
    WeightHandle,
    WeightSyncError,
)
from torchtitan_rl.weight_sync.memory_file import HEADER_BYTES, ShmLocation
from torchtitan_rl.weight_sync.ranges import merge_slots
from torchtitan_rl.weight_sync.relay import Order, Source, SourceError

Fetch = Callable[[str, dict[str, Any]], Awaitable[Sequence[int]]]
"""Has the relay of a host fetch what an order says: `Relay.fetch` there, with its errors."""
_PARTS_AT_ONCE = 16
"""Most trainer ranks whose parts are on their way at once: each takes a thread of every host."""
_PADDING = 63
"""Most bytes between two slots."""
_COMPLAINTS = 2
"""So many hosts must say that the trainer's host hands on nothing before no other is ordered any
more."""
_PATIENCE = 5.0
"""Seconds within which a host must answer whose successor has got nothing from it."""


@dataclass(slots=True)
class Spread:
    """Where the weights are now."""

    handles: dict[str, WeightHandle] = field(default_factory=dict)
    """By host: a handle that can be opened there."""
    errors: dict[str, Exception] = field(default_factory=dict)
    """By host: why it does not have them."""


async def spread(
    handle: WeightHandle,
    homes: Sequence[str],
    hosts: Sequence[str],
    relays: Mapping[str, Mapping[str, Any]],
    fetch: Fetch,
    *,
    seconds: float = 600.0,
) -> Spread:
    """Bring a published snapshot to hosts. A host that fails is left out, and no reason for others
    to fail.

    Args:
        handle: What the trainer's ranks have published, merged.
        homes: The host of each part.
        hosts: Where the weights are needed, in the order of the chain.
        relays: By host: the `location` of its relay.
        fetch: Has a host fetch a part.
        seconds: How long all of it may take.

    Example:
        async def fetch(host, order):
            return location_in(await agents[host].answer(order))

        there = await spread(handle, ["a"], ["a", "b", "c"], relays, fetch)
        await asyncio.gather(*(pull(host, there.handles[host]) for host in there.handles))
    """
    if handle.transport not in ("shm", "relay"):
        raise ValueError(f"snapshots of {handle.transport} are not handed on from host to host")
    gate, end = asyncio.Semaphore(_PARTS_AT_ONCE), time.monotonic() + seconds
    publishers = tuple(part.publisher for part in handle.parts)

    async def one(part: Part, home: str) -> _Chain:
        template = _Template(part, handle.version, publishers)
        others = [host for host in dict.fromkeys(hosts) if host != home]
        chain = _Chain(template, home, others, relays, fetch)
        async with gate:
            await chain.run(max(0.0, end - time.monotonic()))
        return chain

    pairs = zip(handle.parts, homes, strict=True)
    chains = await together(*(one(part, home) for part, home in pairs))
    result = Spread()
    for host in dict.fromkeys(hosts):
        errors = [chain.errors[host] for chain in chains if host in chain.errors]
        if errors:
            result.errors[host] = errors[0]
        else:
            parts = tuple(chain.part_on(host) for chain in chains)
            result.handles[host] = replace(handle, transport="shm", parts=parts)
    return result


class _Template:
    """The orders for a part, which differ only in the source."""

    def __init__(self, part: Part, version: int, publishers: tuple[int, ...]) -> None:
        self.part = part
        bounds = [(slot.offset, slot.nbytes) for slot in part.slots]
        slots = ((*where, last) for where, last in zip(bounds, part.changed, strict=True))
        self._order = {
            "publisher": part.publisher,
            "number": part.number,
            "version": version,
            "size": part.location.size - HEADER_BYTES,
            "slots": merge_slots(slots, gap=_PADDING),
            "publishers": publishers,
        }

    def order(self, attempt: int, source: Source) -> dict[str, Any]:
        return asdict(Order(**self._order, attempt=attempt, source=source))


class _Chain:
    """The way of one trainer rank's part through the hosts."""

    def __init__(
        self,
        template: _Template,
        home: str,
        hosts: Sequence[str],
        relays: Mapping[str, Mapping[str, Any]],
        fetch: Fetch,
    ) -> None:
        self._template, self._home, self._hosts = template, home, hosts
        self._relays, self._fetch = relays, fetch
        # Counted from a number of its own: what failed before does not stand in the way.
        self._attempts = dict.fromkeys(hosts, secrets.randbits(62))
        self._answered = {host: asyncio.Event() for host in hosts}
        self._locations: dict[str, ShmLocation] = {}
        self._complaints = 0
        self._hopeless: Exception | None = None
        self.errors: dict[str, Exception] = {}

    def part_on(self, host: str) -> Part:
        """The part, as the processes of a host can open it."""
        part = self._template.part
        return part if host == self._home else part.at(self._locations[host])

    async def run(self, seconds: float) -> None:
        """Bring the part to all hosts, or find out why that is impossible."""
        try:
            async with asyncio.timeout(seconds):
                await together(*map(self._bring, self._hosts))
        except TimeoutError:
            for host in set(self._hosts) - self._locations.keys() - self.errors.keys():
                text = f"{host} has not got the weights within {seconds:.3g} s"
                self.errors[host] = WeightSyncError(text)

    async def _bring(self, host: str) -> None:
        """Have a host fetch the part: from the host before it, then from others, and if none of
        them can hand it on, from the trainer's."""
        tried: set[tuple[str, int]] = set()
        while self._hopeless is None:
            source = self._source(host, tried)
            tried.add((source, self._attempts.get(source, 0)))
            error = await self._order(host, source)
            if error is None:
                self._answered[host].set()
                return
            if not isinstance(error, SourceError) or source == self._home:
                self._give_up(host, error)
                return
            # Those behind it wait for its next attempt.
            self._attempts[host] += 1
            self._answered[host].set()
            self._answered[host] = asyncio.Event()
            with contextlib.suppress(TimeoutError):  # it hangs, or is cut off from this one only
                async with asyncio.timeout(_PATIENCE):
                    await self._answer_of(source, tried)
        self._give_up(host, self._hopeless)

    async def _answer_of(self, source: str, tried: set[tuple[str, int]]) -> None:
        """Wait for what became of the attempt of a host from which another one got nothing."""
        while (
            (source, self._attempts[source]) in tried
            and source not in self.errors
            and source not in self._locations
        ):
            await self._answered[source].wait()

    def _source(self, host: str, tried: set[tuple[str, int]]) -> str:
        """The nearest host before this one that has the part, or will, as far as is known."""
        before = self._hosts[: self._hosts.index(host)]
        for other in reversed(before):
            if other not in self.errors and (other, self._attempts[other]) not in tried:
                return other
        return self._home

    async def _order(self, host: str, source: str) -> Exception | None:
        location = list(astuple(self._template.part.location)) if source == self._home else None
        attempt = self._attempts.get(source, 0)
        where = Source(**self._relays[source], location=location, attempt=attempt)
        try:
            order = self._template.order(self._attempts[host], where)
            self._locations[host] = ShmLocation(*await self._fetch(host, order))
        except Exception as error:
            return error
        return None

    def _give_up(self, host: str, error: Exception) -> None:
        self.errors[host] = error
        self._answered[host].set()
        # What no trainer's host hands on, none of the others will get either.
        self._complaints += isinstance(error, SourceError)
        if isinstance(error, StaleHandleError) or self._complaints >= _COMPLAINTS:
            self._hopeless = error
