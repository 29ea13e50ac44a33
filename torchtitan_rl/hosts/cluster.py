"""The hosts of a run, all together: connected, kept, and given back."""

import asyncio
import secrets
import socket
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from torchtitan_rl.config.cluster import ClusterConfig
from torchtitan_rl.core.waiting import together
from torchtitan_rl.hosts.addresses import split_address
from torchtitan_rl.hosts.host import THIS_HOST, Host, RemoteHost, ThisHost
from torchtitan_rl.hosts.launchers.launcher import Launcher, make_launcher
from torchtitan_rl.hosts.link import Link, LinkThread
from torchtitan_rl.hosts.messages import HostError
from torchtitan_rl.observability.console import console

LOOK_SECONDS = 0.2
"""How often it is looked whether hosts have come."""
SAY_SECONDS = 5.0
"""How long hosts may be waited for before that is said."""


def chosen_hosts(config: ClusterConfig, role: str, hosts: list[Host]) -> list[Host]:
    """Hosts that a role may have, of all hosts of a run."""
    chosen = config.roles.of(role)
    if not chosen and role == "reference":
        chosen = (0,)
    if missing := [number for number in chosen if number >= len(hosts)]:
        raise ValueError(
            f"cluster.roles.{role} names host {missing[0]}, and the run has {len(hosts)}: they are "
            "counted from 0"
        )
    return [hosts[number] for number in chosen] if chosen else hosts


class PlannedHosts:
    """Hosts of a run that are named and not connected: nothing is known of their machines."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._hosts: list[Host] = [PlannedHost(name) for name in config.hosts]

    def hosts_of(self, role: str) -> list[Host]:
        """The hosts of a role."""
        return chosen_hosts(self._config, role, self._hosts)


class PlannedHost(ThisHost):
    """A host of which only the name is known."""

    def __init__(self, name: str) -> None:
        self.name = name


class Cluster(AbstractAsyncContextManager["Cluster"]):
    """The hosts of a run, connected while entered. Without a launcher: this host alone.

    Example:
        async with Cluster(config.cluster, run="first") as cluster:
            trainers = cluster.hosts_of("trainer")
    """

    def __init__(self, config: ClusterConfig, *, run: str) -> None:
        self._config, self._run = config, run
        self._launcher: Launcher | None = make_launcher(config)
        self._thread: LinkThread | None = None
        self._links: list[Link] = []
        self.remote: list[RemoteHost] = []
        """The hosts that workers lend; none if the run is on this host."""

    @property
    def hosts(self) -> list[Host]:
        """All hosts of the run, in order."""
        return list(self.remote) or [THIS_HOST]

    def hosts_of(self, role: str) -> list[Host]:
        """The hosts of a role."""
        return chosen_hosts(self._config, role, self.hosts)

    @property
    def lost(self) -> list[RemoteHost]:
        """Hosts without a connection."""
        return [host for host in self.remote if not host.up]

    def describe(self) -> list[str]:
        """Lines about what entering would start, and where; nothing is started for it."""
        return self._launcher.describe() if self._launcher else []

    async def __aenter__(self) -> "Cluster":
        if self._launcher is None:
            return self
        try:
            places = await self._launcher.start()
            self._thread = LinkThread()
            # A worker knows by it whether a controller that connects is the one that it had.
            owner = f"{socket.gethostname()} {secrets.token_hex(8)}"
            resolved = [await _resolved(place) for place in places]
            for number, (address, port) in enumerate(resolved):
                if (address, port) in resolved[:number]:
                    raise HostError(
                        f"{places[resolved.index((address, port))]} and {places[number]} are one "
                        f"worker, at {address} port {port}: name each host once"
                    )
                link = Link(
                    address,
                    port,
                    secret=self._launcher.secret,
                    run=self._run,
                    owner=f"{owner} {number}",
                    silence=self._config.silence_seconds,
                )
                self._links.append(link)
                self.remote.append(RemoteHost(places[number], link, self._thread))
            for link in self._links:
                self._thread.loop.call_soon_threadsafe(link.start)
            await self.wait_for_all()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        thread, self._thread = self._thread, None
        try:
            if thread is not None:
                await together(*(thread.run(link.close()) for link in self._links))
        finally:  # also if that is cancelled
            if thread is not None:
                thread.close()
            self._links.clear()
            self.remote.clear()
            if self._launcher is not None:
                await self._launcher.stop()

    async def wait_for_all(self) -> None:
        """Return when every host is connected; an error names those that do not come in time, and
        those that do not want this run."""
        seconds = self._config.wait_seconds
        loop = asyncio.get_running_loop()
        deadline, said = loop.time() + seconds, loop.time() + SAY_SECONDS
        while lost := self.lost:
            gone = [(h, self._why_gone(h)) for h in lost]
            if any(why for _, why in gone):
                raise HostError("; ".join(f"{host}: {why}" for host, why in gone if why))
            if refused := [host for host in lost if host.refused]:
                raise HostError(_list_of(refused))
            if loop.time() > deadline:
                raise HostError(
                    f"waited {seconds:.0f} s (cluster.wait_seconds) for {_list_of(lost)}. Is "
                    "`torchtitan-rl worker` running there, and may this host connect to its port?"
                )
            if loop.time() > said:
                said = deadline  # once
                console.print(f"waiting for {_list_of(lost)}", markup=False)
            await asyncio.sleep(LOOK_SECONDS)

    def _why_gone(self, host: RemoteHost) -> str:
        assert self._launcher is not None
        return self._launcher.why_gone(self.remote.index(host))

    # ---- files ----------------------------------------------------------------------------------

    async def check_shared(self, folder: Path, hosts: Sequence[Host], what: str) -> None:
        """Refuse hosts that do not see the same folder as this one: a file in it says so."""
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / f".shared-{secrets.token_hex(8)}"
        mark.write_text(mark.name)
        try:
            remote = [host for host in hosts if isinstance(host, RemoteHost)]
            seen = await together(*(host.has_text(mark, mark.name) for host in remote))
        finally:
            mark.unlink(missing_ok=True)
        if missing := [host.name for host, there in zip(remote, seen, strict=True) if not there]:
            raise HostError(
                f"{what} is in {folder.absolute()}, which is not the same folder on host "
                f"{', '.join(missing)}: put it on a file system that all hosts share (--output_dir)"
            )

    async def check_model(self, hosts: Sequence[Host], folder: Path, who: str) -> None:
        """Refuse hosts that have not the model that they are to load weights from."""
        remote = [host for host in hosts if isinstance(host, RemoteHost)]
        there = await together(*(host.has_files_of(folder) for host in remote))
        if missing := [host.name for host, has in zip(remote, there, strict=True) if not has]:
            raise HostError(
                f"the {who} loads {folder.absolute()}, and host {', '.join(missing)} has other "
                "files there, or none: put the model on a file system that all hosts share, or "
                "copy it to the same path"
            )


def _list_of(hosts: Sequence[RemoteHost]) -> str:
    return "; ".join(
        f"{host}{'' if host.name == host.worker else f' ({host.worker})'}: {host.why_not_up}"
        for host in hosts
    )


async def _resolved(place: str) -> tuple[str, int]:
    """IP address and port of a worker; the name is looked up here and nowhere else."""
    name, port = split_address(place)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise HostError(f"the name of host {name!r} is not known here: {error}") from error
    return str(found[0][4][0]), port
