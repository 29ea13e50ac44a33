"""SSH servers on machines of a test, with throwaway keys, and an `ssh` that reaches them by name.

Example::

    with Machines(2) as machines, SshServers(machines[1:]) as servers:
        machines[0].run(["ssh", "machine1", "hostname"], env=servers.environment, check=True)
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.hosts.machines import Machine, Process, how

PATIENCE = 20.0
NEEDED = ("sshd", "ssh", "ssh-keygen")

SERVER = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/client_key.pub
# The keys lie in a temporary folder, which others may enter.
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
PidFile none
PrintMotd no
"""

CLIENT = """\
Host {name}
  HostName {address}
  Port {port}
"""

CLIENT_OF_ALL = """\
Host *
  User root
  IdentityFile {folder}/client_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking yes
  BatchMode yes
"""


def missing() -> str:
    """Why there can be no SSH servers here; empty if there can."""
    if how() != "root":
        return "an SSH server that lets root in needs root and namespaces"
    path = f"{os.environ['PATH']}:/usr/sbin"
    lacks = [name for name in NEEDED if shutil.which(name, path=path) is None]
    return f"{', '.join(lacks)} not found: run scripts/cluster_tools.sh" if lacks else ""


class SshServers:
    """An SSH server on each of some machines, running while entered.

    Attributes:
        environment: Variables with which `ssh <name of a machine>` works, on any machine.
        config: The client's configuration, for `ssh -F`.
        folder: Keys, configuration and logs; gone at the end.
    """

    def __init__(self, machines: Sequence[Machine], *, port: int = 2222) -> None:
        self.machines, self.port = list(machines), port
        self.folder = Path(tempfile.mkdtemp(prefix="ssh-"))
        self.config = self.folder / "ssh_config"
        wrapper = self.folder / "bin" / "ssh"
        self.environment = {**os.environ, "PATH": f"{wrapper.parent}:{os.environ['PATH']}"}
        self._servers: list[Process] = []
        for name in ("host_key", "client_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name]
            subprocess.run(command, check=True)
        host_key = (self.folder / "host_key.pub").read_text()
        known = [f"[{machine.address}]:{port} {host_key}" for machine in self.machines]
        (self.folder / "known_hosts").write_text("".join(known))
        hosts = [CLIENT.format(name=m.name, address=m.address, port=port) for m in self.machines]
        self.config.write_text("".join(hosts) + CLIENT_OF_ALL.format(folder=self.folder))
        # The user's own configuration is left alone.
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.config} "$@"\n')
        wrapper.chmod(0o755)

    def __enter__(self) -> Self:
        try:
            for machine in self.machines:
                self.start(machine)
        except BaseException:
            self.close()
            raise
        return self

    def start(self, machine: Machine) -> None:
        """Start the server of a machine, also after the machine was off."""
        # A folder that sshd insists on, and which nobody else is to see.
        setup = "mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/sshd"
        machine.run(["sh", "-c", setup], check=True)
        config = self.folder / f"sshd_config-{machine.name}"
        config.write_text(
            SERVER.format(port=self.port, address=machine.address, folder=self.folder)
        )
        path = f"{os.environ['PATH']}:/usr/sbin"
        sshd = shutil.which("sshd", path=path)
        with (self.folder / f"{machine.name}.log").open("ab") as log:
            server = machine.start(
                [sshd, "-D", "-e", "-f", config], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._servers.append(server)
        end = time.monotonic() + PATIENCE
        while machine.run(["ssh", "-F", self.config, machine.name, "true"]).returncode:
            if server.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"no SSH server on {machine.name}: {self.log(machine)}")
            time.sleep(0.05)

    def log(self, machine: Machine) -> str:
        """What the server of a machine has written."""
        return (self.folder / f"{machine.name}.log").read_text()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the servers and remove every file; connections end with their machines."""
        for server in self._servers:
            server.kill()
            server.wait(PATIENCE)
        self._servers.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
