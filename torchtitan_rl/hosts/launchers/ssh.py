"""Workers started by ssh, which end with their connection."""

import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial

from torchtitan_rl.config.cluster import ClusterConfig
from torchtitan_rl.hosts.addresses import join_address, split_address
from torchtitan_rl.hosts.launchers.started import StartedWorker, start_all, stop_all
from torchtitan_rl.hosts.secret import new_secret

OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
"""Ask for no password, and notice a connection that is dead."""


class SshHosts:
    """Hosts on which ssh starts a worker, in the folder and by the Python of this process.

    Example:
        launcher = SshHosts(ClusterConfig(launcher="ssh", hosts=("node0", "me@node1")))
        places = await launcher.start()
    """

    def __init__(self, config: ClusterConfig) -> None:
        self.secret = new_secret()
        self._hosts, self._port, self._ssh = config.hosts, config.port, shlex.split(config.ssh)
        self._workers = [
            StartedWorker(host, partial(ssh_command, host, ssh=self._ssh), self.secret, port=port)
            for host, port in ((host, port_of(host, config.port)) for host in config.hosts)
        ]

    def describe(self) -> list[str]:
        commands = (
            ssh_command(host, port_of(host, self._port), ssh=self._ssh) for host in self._hosts
        )
        return [f"start a worker: {shlex.join(command)}" for command in commands]

    async def start(self) -> list[str]:
        return await start_all(self._workers)

    def why_gone(self, number: int) -> str:
        return ""

    async def stop(self) -> None:
        await stop_all(self._workers)


def port_of(host: str, usual: int) -> int:
    """Port of a host's worker; `host` is `[<user>@]<name>[:<port>]`."""
    return split_address(host.rpartition("@")[2], usual=usual)[1]


def ssh_command(host: str, port: int, *, ssh: Sequence[str]) -> list[str]:
    """The command that starts a worker on a host, at a port."""
    user, at, address = host.rpartition("@")
    name, _ = split_address(address)
    place = join_address(name, port)
    worker = [sys.executable, "-m", "torchtitan_rl", "worker", "--address", place, "--stdin"]
    inside = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(worker)}"
    return [*ssh, *OPTIONS, f"{user}{at}{name}", inside]
