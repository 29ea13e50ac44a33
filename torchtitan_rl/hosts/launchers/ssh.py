"""Workers started by ssh, which end with their connection."""

import os
import shlex
import sys
from collections.abc import Sequence

from torchtitan_rl.config.cluster import ClusterConfig
from torchtitan_rl.hosts.launchers.started import StartedWorker, start_all, stop_all
from torchtitan_rl.hosts.secret import new_secret
from torchtitan_rl.hosts.worker import split_address

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
        self._commands = {
            host: ssh_command(host, port=config.port, ssh=shlex.split(config.ssh))
            for host in config.hosts
        }
        self._workers: list[StartedWorker] = []

    def describe(self) -> list[str]:
        return [f"start a worker: {shlex.join(command)}" for command in self._commands.values()]

    async def start(self) -> list[str]:
        # Each is started again with another one's port only if it was given none.
        self._workers = [
            StartedWorker(host, command, self.secret) for host, command in self._commands.items()
        ]
        return await start_all(self._workers)

    def why_gone(self, number: int) -> str:
        return ""

    async def stop(self) -> None:
        await stop_all(self._workers)


def ssh_command(host: str, *, port: int, ssh: Sequence[str]) -> list[str]:
    """The command that starts a worker on a host; `host` is `[<user>@]<name>[:<port>]`, whose port
    is the worker's."""
    user, at, place = host.rpartition("@")
    name, own_port = split_address(place, usual=port)
    address = f"[{name}]:{own_port}" if ":" in name else f"{name}:{own_port}"
    worker = [sys.executable, "-m", "torchtitan_rl", "worker", "--address", address, "--stdin"]
    inside = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(worker)}"
    return [*ssh, *OPTIONS, f"{user}{at}{name}", inside]
