"""What a launcher does, and the choice of one."""

import os
from typing import Protocol

from torchtitan_rl.config.cluster import ClusterConfig
from torchtitan_rl.hosts.messages import HostError
from torchtitan_rl.hosts.secret import load_secret


class LaunchError(HostError):
    """Workers cannot be started; the message says on which host, and why."""


class Launcher(Protocol):
    """Starts a worker on each host, unless somebody else does."""

    @property
    def secret(self) -> str:
        """The secret of its workers."""
        ...

    def describe(self) -> list[str]:
        """Lines about what `start` would do."""
        ...

    async def start(self) -> list[str]:
        """Start the workers; returns where each is, `<address>:<port>`."""
        ...

    def why_gone(self, number: int) -> str:
        """Why the worker of a host is gone for good; empty if that is not known."""
        ...

    async def stop(self) -> None:
        """End the workers that were started."""
        ...


class GivenHosts:
    """Workers that somebody else has started."""

    def __init__(self, config: ClusterConfig) -> None:
        self._hosts = list(config.hosts)
        self.secret = load_secret(config.secret_file)

    def describe(self) -> list[str]:
        return [f"use the worker at {host}" for host in self._hosts]

    async def start(self) -> list[str]:
        return self._hosts

    def why_gone(self, number: int) -> str:
        return ""

    async def stop(self) -> None:
        """Nothing: they wait for the next run."""


def chosen_launcher(config: ClusterConfig) -> str:
    """The launcher that `auto` stands for here.

    Example:
        >>> chosen_launcher(ClusterConfig(hosts=("a", "b")))
        'hosts'
    """
    if config.launcher != "auto":
        return config.launcher
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if config.hosts:
            raise LaunchError(
                "torchrun has started this command, and cluster.hosts names hosts besides: use one "
                "of the two"
            )
        return "torchrun"
    return "hosts" if config.hosts else "here"


def make_launcher(config: ClusterConfig) -> Launcher | None:
    """The launcher of a run; None if the run is on this host."""
    chosen = chosen_launcher(config)
    if chosen == "here":
        return None
    if chosen == "ssh":
        from torchtitan_rl.hosts.launchers.ssh import SshHosts

        return SshHosts(config)
    if chosen == "torchrun":
        from torchtitan_rl.hosts.launchers.torchrun import TorchrunHosts

        return TorchrunHosts(config)
    if chosen == "slurm":
        from torchtitan_rl.hosts.launchers.slurm import SlurmHosts

        return SlurmHosts(config)
    return GivenHosts(config)
