"""Weights from host to host on machines of namespaces, whose wires are limited to 1 Gbit/s."""

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from common import note, report

sys.path.append(str(Path(__file__).parents[1]))
from tests.hosts.machines import Machine, Machines
from tests.weight_sync.relay_hosts import SLOT, Host, Rank, reach
from torchtitan_rl.weight_sync.handle import WeightHandle

HOSTS = (1, 2, 4, 8)
SLOTS = 64
"""Megabytes of weights."""
WARM_UP, SYNCS = 2, 3
"""The two copies of each host are new memory in the first two."""
LIMIT = "tbf rate 1gbit burst 256kb latency 50ms"
Sync = Callable[[WeightHandle, Host, Sequence[Host]], Awaitable[None]]


async def chain(handle: WeightHandle, home: Host, hosts: Sequence[Host]) -> None:
    """What `relay` does."""
    there = await reach(handle, home, hosts)
    assert not there.errors, there.errors


async def star(handle: WeightHandle, home: Host, hosts: Sequence[Host]) -> None:
    """Each host gets a copy from the trainer's host: what there is without a chain."""
    await asyncio.gather(*(chain(handle, home, [host]) for host in hosts))


def limited(machine: Machine) -> None:
    """Let a machine send 1 Gbit/s at most."""
    machine.run(["tc", "qdisc", "add", "dev", "eth0", "root", *LIMIT.split()], check=True)


async def timed(sync: Sync, count: int, *, limit: bool = True) -> tuple[float, float]:
    """Seconds of a sync of all weights to so many hosts, and copies on the trainer's wire."""
    with Machines(count + 1) as machines:
        if limit:
            for machine in machines:
                limited(machine)
        hosts = [host.ready() for host in [Host(machine, 60.0) for machine in machines]]
        home, *others = hosts
        rank, seconds, copies = Rank(home, SLOTS), [], []
        for number in range(WARM_UP + SYNCS):
            handle = rank.publish(number)
            before, started = home.sent(), time.perf_counter()
            await sync(handle, home, others)
            seconds.append(time.perf_counter() - started)
            copies.append((home.sent() - before) / (SLOTS * SLOT))
        for host in hosts:
            host.close()
    return statistics.median(seconds[WARM_UP:]), max(copies[WARM_UP:])


async def hosts_in_a_chain() -> None:
    """Bytes on the trainer's wire, and time, for more and more hosts: in a chain, and each from the
    trainer's host."""
    for name, sync in (("relay", chain), ("from_trainer", star)):
        one = None
        for count in HOSTS:
            case = f"{count} host{'s' * (count > 1)}, {SLOTS} MB, 1 Gbit/s"
            seconds, copies = await timed(sync, count)
            one = one or seconds
            report("hosts", f"{name}_copies_on_trainers_wire", case, copies)
            report("hosts", f"{name}_seconds", case, seconds)
            report("hosts", f"{name}_time_against_one_host", case, seconds / one)


# ---- one hop ------------------------------------------------------------------------------------

SEND = """
import os, socket, sys
address, size = sys.argv[1], int(sys.argv[2])
file = os.memfd_create("plain")
os.write(file, os.urandom(size))
listener = socket.create_server((address, 0))
print(listener.getsockname()[1], flush=True)
while True:
    peer = listener.accept()[0]
    with open(file, "rb", closefd=False) as opened:
        peer.sendfile(opened)
    peer.recv(1)
"""

RECEIVE = """
import mmap, os, socket, sys, time
address, port, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
file = os.memfd_create("plain")
os.ftruncate(file, size)
memory = memoryview(mmap.mmap(file, size))
for _ in range(5):
    started, position = time.perf_counter(), 0
    peer = socket.create_connection((address, port))
    while position < size:
        position += peer.recv_into(memory[position:])
    peer.send(b"x")
    print(time.perf_counter() - started, flush=True)
"""


def plain_tcp() -> float:
    """Seconds in which as many bytes go from one machine's memory to another's by sendfile and
    recv, without a limit."""
    with Machines(2) as (first, second):
        size = SLOTS * SLOT
        sender = first.start(
            [sys.executable, "-c", SEND, first.address, size], stdout=subprocess.PIPE, text=True
        )
        assert sender.stdout is not None
        port = int(sender.stdout.readline())
        command = [sys.executable, "-c", RECEIVE, first.address, port, size]
        lines = second.run(command, check=True).stdout.split()
    return statistics.median(float(line) for line in lines[WARM_UP:])


async def one_hop() -> None:
    """A sync of one host against plain TCP, without a limit: as fast as this machine is."""
    plain = plain_tcp()
    seconds, _ = await timed(chain, 1, limit=False)
    case = f"1 host, {SLOTS} MB, no limit"
    report("hosts", "plain_tcp_seconds", case, plain)
    report("hosts", "relay_seconds", case, seconds)
    report("hosts", "relay_vs_plain_tcp", case, plain / seconds)


def main() -> None:
    with Machines(1) as (machine,):
        if machine.machines.stand_in:
            note(f"no figures of relay: {machine.machines.stand_in}")
            return
    os.chdir(Path(__file__).parents[1])  # the hosts' processes import from there
    for part in (one_hop, hosts_in_a_chain):
        asyncio.run(part())
