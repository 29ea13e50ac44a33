"""Machines for tests of several hosts: namespaces of Linux on this one machine, joined by a switch.

Each has its own network with one address, its own PIDs and /proc, host name, boot id, /dev/shm and
IPC. Files are shared, except in the folders of `private`. A machine is alive as long as the process
that made it: when that one is killed, the kernel ends the machine's processes, and removes its
network and mounts.

Root is not needed if users may make namespaces (user namespaces). Where neither is possible, a
machine is a set of processes with an address of the loopback network: `Machines.stand_in` says so,
and a warning does.

Example::

    with Machines(2) as (first, second):
        server = second.start(["python", "-m", "http.server", "--bind", second.address, "8000"])
        first.run(["curl", f"http://{second.address}:8000"], check=True)
        second.cut()
"""

import os
import signal
import subprocess
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

OWN = ("--net", "--pid", "--uts", "--ipc", "--mount")
"""What each machine has of its own, as options of unshare and nsenter."""

WITHOUT_ROOT = ("unshare", "--user", "--map-root-user")
PATIENCE = 20.0


@cache
def how() -> str:
    """How machines can be made here: as `root`, in `user` namespaces, or as `processes` only."""
    trial = [
        "unshare",
        *OWN,
        "--fork",
        "--mount-proc",
        "ip",
        "link",
        "add",
        "port0",
        "type",
        "veth",
    ]
    for name, prefix in (("root", ()), ("user", WITHOUT_ROOT)):
        try:
            done = subprocess.run([*prefix, *trial], capture_output=True)
        except FileNotFoundError:
            break
        if done.returncode == 0:
            return name
    return "processes"


class Machine:
    """One machine. It is on after `boot` (Machines does it), and off after `kill`."""

    def __init__(self, machines: "Machines", number: int) -> None:
        self.machines, self.number = machines, number
        self.name = f"{machines.names}{number}"
        self.address = machines.address(number)
        self._holder: subprocess.Popen[bytes] | None = None
        self._started: list[Process] = []
        self.init = 0

    def boot(self) -> None:
        """Turn the machine on, also after `kill`; it has the same address again."""
        assert self._holder is None, f"{self.name} is on"
        if self.machines.stand_in:
            self._holder = subprocess.Popen(["sleep", "infinity"])
            self.init = self._holder.pid
            return
        self._holder, self.init = self.machines.hold(OWN, self._setup())
        self.machines.plug(self)

    def _setup(self) -> str:
        """Commands of the machine's first process before it only waits."""
        hosts = "\\n".join(f"{self.machines.address(i)} {name}" for i, name in self._known())
        lines = [
            f"hostname {self.name}",
            "mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
            f"echo {uuid.uuid4()} > /dev/shm/boot_id",
            "mount --bind /dev/shm/boot_id /proc/sys/kernel/random/boot_id",
            f"printf '127.0.0.1 localhost\\n{hosts}\\n' > /dev/shm/hosts",
            "mount --bind /dev/shm/hosts /etc/hosts",
            "rm -f /dev/shm/boot_id /dev/shm/hosts",
            *(f"mount -t tmpfs tmpfs '{folder}'" for folder in self.machines.private),
        ]
        return " && ".join(lines)

    def _known(self) -> list[tuple[int, str]]:
        """Machines whose names this one can resolve; without `resolve`, not even its own."""
        return [(m.number, m.name) for m in self.machines.all] if self.machines.resolve else []

    def start(self, command: Sequence[object], **options: Any) -> "Process":
        """Start a command on this machine; options are those of Popen."""
        assert self._holder is not None, f"{self.name} is off"
        words = [str(word) for word in command]
        enter = self.machines.entering(self.init, OWN)
        process = Process([*enter, *words], entered=not self.machines.stand_in, **options)
        self._started.append(process)
        return process

    def run(self, command: Sequence[object], **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run a command on this machine to its end; options are those of subprocess.run."""
        words = [str(word) for word in command]
        enter = self.machines.entering(self.init, OWN)
        return subprocess.run([*enter, *words], capture_output=True, text=True, **options)

    def pids(self) -> list[int]:
        """PIDs, as seen from here, of all processes of this machine except its first one."""
        if self.machines.stand_in:
            return sorted({pid for process in self._started for pid in tree(process.pid)})
        mine = namespace(self.init)
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return sorted(pid for pid in pids if pid != self.init and namespace(pid) == mine)

    def commands(self) -> list[str]:
        """Command lines of all processes of this machine except its first one."""
        lines = (read(f"/proc/{pid}/cmdline").replace("\0", " ").strip() for pid in self.pids())
        return [line for line in lines if line]

    def bytes_sent(self) -> int:
        """Bytes that have left this machine by its network card since it was turned on."""
        assert not self.machines.stand_in, self.machines.stand_in
        lines = Path(f"/proc/{self.init}/net/dev").read_text().splitlines()
        card = next(line for line in lines if line.strip().startswith("eth0:"))
        return int(card.split(":")[1].split()[8])

    def cut(self) -> None:
        """Unplug the network: from now on, whatever is sent to or by this machine is lost."""
        if self.machines.stand_in:  # the nearest to it: nobody answers
            self.freeze()
        else:
            self.machines.ip("link", "set", f"port{self.number}", "nomaster")

    def restore(self) -> None:
        """Plug the network in again."""
        if self.machines.stand_in:
            self.thaw()
        else:
            self.machines.ip("link", "set", f"port{self.number}", "master", "switch")

    def freeze(self) -> None:
        """Stop every process of the machine, as if its clock stood still."""
        stopped: set[int] = set()
        while more := set(self.pids()) - stopped:
            for pid in more:
                send(pid, signal.SIGSTOP)
            stopped |= more

    def thaw(self) -> None:
        """Let the processes of the machine go on."""
        # nsenter stops itself with the command that it waits for.
        waiting = [process.pid for process in self._started if process.poll() is None]
        for pid in [*waiting, *self.pids()]:
            send(pid, signal.SIGCONT)

    def kill(self) -> None:
        """Turn the machine off at once: its processes are killed, its /dev/shm is lost."""
        if self._holder is None:
            return
        left = self.pids()
        if self.machines.stand_in:
            for pid in left:
                send(pid, signal.SIGKILL)
        self.thaw()  # a stopped nsenter would not bury its command
        send(self.init, signal.SIGKILL)
        self._holder.wait(PATIENCE)
        if self._holder.stdout is not None:
            self._holder.stdout.close()
        self._holder = None
        for process in self._started:
            process.wait(PATIENCE)
        self._started.clear()
        until(lambda: not any(alive(pid) for pid in left), f"the processes of {self.name} end")


class Process(subprocess.Popen[Any]):
    """A command on a machine. `signal` reaches the command itself, `kill` also."""

    def __init__(self, words: list[str], entered: bool, **options: Any) -> None:
        super().__init__(words, **options)
        self.entered = entered

    def inner(self) -> int:
        """PID of the command as seen from here; 0 if it has ended."""
        if not self.entered:
            return self.pid
        until(lambda: children(self.pid) or self.poll() is not None, "the command starts")
        return next(iter(children(self.pid)), 0)

    def signal(self, number: int) -> None:
        if pid := self.inner():
            send(pid, number)

    def send_signal(self, sig: int) -> None:
        self.signal(sig)


class Machines:
    """N machines on one switch, turned on when entered, gone when left.

    Args:
        count: How many.
        resolve: Whether every machine can resolve the names of all; else it knows only addresses.
        private: Folders in which each machine has files of its own, at first none.
        names: Beginning of the machines' names; their number follows.
        made: How; what `how` finds if empty.
    """

    def __init__(
        self,
        count: int,
        *,
        resolve: bool = True,
        private: Sequence[Path | str] = (),
        names: str = "machine",
        made: str = "",
    ) -> None:
        self.resolve, self.private, self.names = resolve, [str(path) for path in private], names
        self.how = made or how()
        self.stand_in = ""
        if self.how == "processes":
            self.stand_in = (
                "neither root nor user namespaces: the machines of this test are sets of processes"
            )
            if not made:
                warnings.warn(self.stand_in, stacklevel=2)
        self._switch: subprocess.Popen[bytes] | None = None
        self._switch_pid = 0
        self.all = [Machine(self, number) for number in range(count)]

    def address(self, number: int) -> str:
        return f"127.77.0.{number + 1}" if self.stand_in else f"10.77.0.{number + 1}"

    def __enter__(self) -> "Machines":
        try:
            if not self.stand_in:
                user = ("--user",) if self.how == "user" else ()
                self._switch, self._switch_pid = self.hold((*user, "--net"), "true")
                self.ip("link", "add", "switch", "type", "bridge")
                self.ip("link", "set", "switch", "up")
            for machine in self.all:
                machine.boot()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for machine in self.all:
            machine.kill()
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait(PATIENCE)
            if self._switch.stdout is not None:
                self._switch.stdout.close()
            self._switch = None

    def __iter__(self) -> Iterator[Machine]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, number: int) -> Machine:
        return self.all[number]

    def hold(self, own: Sequence[str], setup: str) -> tuple["subprocess.Popen[bytes]", int]:
        """A process in namespaces of its own after some commands in it; its parent, and its PID.

        Both are killed when the thread that calls this ends, however it ends.
        """
        pids = "--pid" in own
        inside = ["--fork", "--kill-child=KILL", "--mount-proc"] if pids else []
        mapped = ["--map-root-user"] if "--user" in own else []
        unshare = ["setpriv", "--pdeathsig", "KILL", "unshare", *own, *mapped, *inside]
        # A first process that ignores SIGCHLD buries orphans at once.
        wait = "echo ready && exec env --ignore-signal=CHLD sleep infinity"
        with tempfile.TemporaryFile() as errors:
            holder = subprocess.Popen(
                [*self._as_user(), *unshare, "sh", "-c", f"{setup} && {wait}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            assert holder.stdout is not None
            if holder.stdout.readline() != b"ready\n":
                holder.wait(PATIENCE)
                errors.seek(0)
                raise RuntimeError(f"no machine: {errors.read().decode()}")
        return holder, (children(holder.pid)[0] if pids else holder.pid)

    def _as_user(self) -> list[str]:
        """Prefix of commands that need the rights of the switch's user namespace."""
        if self.how == "user" and self._switch_pid:
            return ["nsenter", f"--target={self._switch_pid}", "--user", "--preserve-credentials"]
        return []

    def entering(self, pid: int, own: Sequence[str]) -> list[str]:
        """Prefix of a command in the namespaces of a process; the working directory is kept."""
        mortal = ["setpriv", "--pdeathsig", "KILL"]
        if self.stand_in:
            return mortal
        user = ["--user", "--preserve-credentials"] if self.how == "user" else []
        return [*mortal, "nsenter", f"--target={pid}", *user, *own, f"--wdns={os.getcwd()}", "--"]

    def ip(self, *words: str) -> None:
        """Run `ip` beside the switch."""
        enter = self.entering(self._switch_pid, ("--net",))
        enter = [word for word in enter if not word.startswith("--wdns")]
        subprocess.run([*enter, "ip", *words], check=True, capture_output=True)

    def plug(self, machine: Machine) -> None:
        """Connect a machine that was just turned on to the switch."""
        port = f"port{machine.number}"
        # The port of a killed machine goes when the kernel gets to it.
        until(lambda: not self._has(port), f"{port} is free")
        # The same hardware address after a boot, as on a real machine: others remember it.
        card = f"02:00:00:77:00:{machine.number + 1:02x}"
        peer = ("peer", "name", "eth0", "address", card, "netns", str(machine.init))
        self.ip("link", "add", port, "type", "veth", *peer)
        self.ip("link", "set", port, "master", "switch", "up")
        inside = (
            f"ip addr add {machine.address}/24 dev eth0 && ip link set lo up && ip link set eth0 up"
        )
        machine.run(["sh", "-c", inside], check=True)

    def _has(self, port: str) -> bool:
        return f"{port}:" in Path(f"/proc/{self._switch_pid}/net/dev").read_text()


def until(condition: Any, what: str) -> None:
    """Wait for a condition that holds within moments; an error names it if it does not."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {PATIENCE:.0f} s until {what}")
        time.sleep(0.01)


def read(path: str) -> str:
    """Text of a file of /proc; empty if its process has ended."""
    try:
        return Path(path).read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def children(pid: int) -> list[int]:
    return [int(child) for child in read(f"/proc/{pid}/task/{pid}/children").split()]


def tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    return [pid, *(below for child in children(pid) for below in tree(child))]


def namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be buried does not."""
    return read(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] not in ([], ["Z"])


def send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
