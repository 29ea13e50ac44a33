"""Weights for the generators of each host: handed on from host to host, if there are several."""

from collections.abc import Iterable, Sequence
from typing import Any

from torchtitan_rl.core.waiting import together
from torchtitan_rl.hosts.host import RemoteHost
from torchtitan_rl.hosts.link import HostLostError
from torchtitan_rl.run.placements import Placements
from torchtitan_rl.weight_sync.handle import WeightHandle
from torchtitan_rl.weight_sync.relay import location_in
from torchtitan_rl.weight_sync.spread import spread

SPREAD_SECONDS = 600.0
"""How long weights may take to reach all hosts."""


class HostWeights:
    """Brings published weights to the hosts of generators.

    Example:
        weights = HostWeights(place_actors(config, cluster))
        handles = await weights.bring(handle, [0, 1])
        await generators[1].actor.pull_weights.call_one(handles[1])
    """

    def __init__(self, placements: Placements) -> None:
        self._placements = placements

    async def bring(
        self, handle: WeightHandle | None, numbers: Iterable[int]
    ) -> dict[int, WeightHandle | None]:
        """The handle as each of these generators can open it; nothing for one whose host is lost.
        With a transport that reaches all hosts by itself, it is the given one."""
        wanted = {number: self._placements.generators[number].hosts[0] for number in numbers}
        remote = {host.name: host for host in wanted.values() if isinstance(host, RemoteHost)}
        if handle is None or handle.transport != "relay" or not remote:
            return dict.fromkeys(wanted, handle)
        homes = self._homes(handle)
        # The trainer's hosts must answer; one of a generator may be lost.
        sessions = {host: host.session for host in homes}
        relays = dict(await together(*(_relay_of(host) for host in sessions)))
        for host in {host for host in remote.values() if host not in homes}:
            try:
                relays |= [await _relay_of(host)]
            except HostLostError:
                del remote[host.name]

        async def fetch(name: str, order: dict[str, Any]) -> Sequence[int]:
            answer = await remote[name].ask("fetch", seconds=SPREAD_SECONDS, order=order)
            return location_in(answer)

        there = await spread(
            handle, [host.name for host in homes], [*remote], relays, fetch, seconds=SPREAD_SECONDS
        )
        if there.errors:  # a trainer's host that is lost is the cause of all others
            pairs = sessions.items()
            await together(*(host.ask("ping", session=session) for host, session in pairs))
        for name, error in there.errors.items():
            if remote[name].up and not isinstance(error, HostLostError):
                raise error
        return {
            number: there.handles[host.name]
            for number, host in wanted.items()
            if host.name in there.handles
        }

    def _homes(self, handle: WeightHandle) -> list[RemoteHost]:
        """The host of each part: each rank of the trainer has published one."""
        trainer = self._placements.trainer
        ranks = [host for host in trainer.hosts for _ in range(trainer.per_host)]
        if len(ranks) != len(handle.parts):
            raise ValueError(f"{len(ranks)} trainer ranks have published {len(handle.parts)} parts")
        return [host for host in ranks if isinstance(host, RemoteHost)]


async def _relay_of(host: RemoteHost) -> tuple[str, dict[str, Any]]:
    return host.name, await host.ask("relay")
