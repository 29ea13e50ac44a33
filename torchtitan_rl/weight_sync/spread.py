"""The controller's half of `relay`: orders to the relays of all hosts, and what to do when one
fails.

Hosts form a chain for each trainer rank's part: the first gets it from the rank's host, each other
one from the host before it. All get their orders at once, and bytes are handed on as they come. If
a host fails, those behind it are ordered again, from the last host that has the part.
"""

import asyncio
import secrets
import time
from collections import Counter
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
"""So many hosts must say that a trainer's host hands on nothing before the others are not ordered
any more. Any other host is left out after the first."""


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
    gate, attempt = asyncio.Semaphore(_PARTS_AT_ONCE), secrets.randbits(62)
    publishers = tuple(part.publisher for part in handle.parts)

    async def one(part: Part, home: str) -> _Chain:
        order = _Template(part, handle.version, publishers, attempt)
        chain = _Chain(order, home, relays, fetch, time.monotonic() + seconds)
        async with gate:
            await chain.run([host for host in dict.fromkeys(hosts) if host != home])
        return chain

    chains = await together(*map(one, handle.parts, homes))
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

    def __init__(self, part: Part, version: int, publishers: tuple[int, ...], attempt: int) -> None:
        self.part, self._attempt = part, attempt
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

    def order(self, relay: Mapping[str, Any], *, at_home: bool, attempt: int) -> dict[str, Any]:
        """The order to fetch from a relay. Attempts are counted: what failed in one of them does
        not stand in the way of the next."""
        location = list(astuple(self.part.location)) if at_home else None
        source = Source(**relay, location=location)
        return asdict(Order(**self._order, source=source, attempt=self._attempt + attempt))


class _Chain:
    """The way of one trainer rank's part through the hosts."""

    def __init__(
        self,
        template: _Template,
        home: str,
        relays: Mapping[str, Mapping[str, Any]],
        fetch: Fetch,
        end: float,
    ) -> None:
        self._template, self._home, self._relays, self._fetch = template, home, relays, fetch
        self._end = end
        self._locations: dict[str, ShmLocation] = {}
        self._complaints: Counter[str] = Counter()
        self.errors: dict[str, Exception] = {}

    def part_on(self, host: str) -> Part:
        """The part, as the processes of a host can open it."""
        part = self._template.part
        return part if host == self._home else part.at(self._locations[host])

    async def run(self, left: list[str]) -> None:
        """Bring the part to hosts, or find out why that is impossible."""
        attempt = 0
        while left:
            left = await self._order_all(left, attempt)
            attempt += 1

    async def _order_all(self, hosts: list[str], attempt: int) -> list[str]:
        """Order hosts at once, each from the one before it; returns those to be ordered again."""
        sources = dict(zip(hosts, [self._source(), *hosts], strict=False))
        orders = (self._order(host, source, attempt) for host, source in sources.items())
        failed: dict[str, Exception] = {}
        for host, came in zip(hosts, await together(*orders), strict=True):
            if isinstance(came, Exception):
                failed[host] = came
            else:
                self._locations[host] = came
        again = [host for host in hosts if host in failed and self._goes_on(host, sources, failed)]
        if again and (error := self._hopeless(failed)) is not None:
            self.errors |= dict.fromkeys(again, error)
            return []
        return again

    def _source(self) -> str:
        """The host that the part is to come from: the last one that has it."""
        good = [host for host in self._locations if not self._complaints[host]]
        return good[-1] if good else self._home

    async def _order(self, host: str, source: str, attempt: int) -> ShmLocation | Exception:
        at_home = source == self._home
        order = self._template.order(self._relays[source], at_home=at_home, attempt=attempt)
        try:
            async with asyncio.timeout(max(0, self._end - time.monotonic())):
                return ShmLocation(*await self._fetch(host, order))
        except TimeoutError:
            return WeightSyncError(f"{host} did not get policy version {order['version']} in time")
        except Exception as error:
            return error

    def _goes_on(
        self, host: str, sources: Mapping[str, str], failed: Mapping[str, Exception]
    ) -> bool:
        """Whether a host that failed is to be ordered again: what it got nothing from was another
        host than the trainer's. Else its error is kept."""
        error, source = failed[host], sources[host]
        if isinstance(error, SourceError):
            if source in failed:
                return True
            self._complaints[source] += 1
            if source != self._home:
                return True
        self.errors[host] = error
        return False

    def _hopeless(self, failed: Mapping[str, Exception]) -> Exception | None:
        """Why no host can get the part from the trainer's any more; None: it may."""
        for error in failed.values():
            if isinstance(error, StaleHandleError):
                return error
        if self._complaints[self._home] >= _COMPLAINTS:
            return next(error for error in self.errors.values() if isinstance(error, SourceError))
        return None
