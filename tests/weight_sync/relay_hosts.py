"""Hosts of a relay for tests: a process on each machine, asked by lines of JSON, without torch."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchtitan_rl.weight_sync.handle import Part, Slot, WeightHandle
from torchtitan_rl.weight_sync.memory_file import ShmLocation
from torchtitan_rl.weight_sync.relay import location_in
from torchtitan_rl.weight_sync.spread import Spread, spread

ROOT = Path(__file__).parents[2]
SLOT = 1 << 20
"""Bytes of a slot."""
SLOTS = 8
"""Slots of a part, unless it says otherwise."""
SIZE = SLOT * SLOTS

HOST = """
import hashlib, json, os, random, sys, time
from torchtitan_rl.weight_sync.memory_file import HEADER_BYTES, MemoryFile
from torchtitan_rl.weight_sync.memory_file import OpenMemoryFile, ShmLocation
from torchtitan_rl.weight_sync.relay import Relay

relay, files = Relay(sys.argv[1], seconds=float(sys.argv[2])), []

def publish(seeds, slot, number, version):  # what a trainer's rank does
    if len(files) < 2:
        file = MemoryFile(slot * len(seeds))
    else:
        file = files.pop(0)
        while not file.reopen():
            time.sleep(0.01)
    slots = (random.Random(f"{n} {seed}").randbytes(slot) for n, seed in enumerate(seeds))
    file.map[HEADER_BYTES:] = b"".join(slots)
    files.append(file)
    location = file.seal(number, version)
    return [location.pid, location.fd, location.size, location.token]

def read(location, number, version):  # what a generator does
    file = OpenMemoryFile(ShmLocation(*location))
    try:
        file.lock(number, version)
        return hashlib.sha256(os.pread(file.fd, location[2], HEADER_BYTES)).hexdigest()
    finally:
        file.close()

print(json.dumps({**relay.location, "torch": "torch" in sys.modules}), flush=True)
for line in sys.stdin:
    do, given = json.loads(line)
    if do == "order":
        answer = relay.answer(given)
    elif do == "counts":
        answer = [relay.sent, relay.received]
    else:
        answer = {"publish": publish, "read": read}[do](**given)
    print(json.dumps(answer), flush=True)
"""

SLOW = """
import json, os, sys, time
from torchtitan_rl.weight_sync.memory_file import MemoryFile
from torchtitan_rl.weight_sync.stream import Stream
import socket

address, stop_after, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
listener = socket.create_server((address, 0))
where = {"address": address, "port": listener.getsockname()[1], "token": ""}
print(json.dumps(where), flush=True)
stream = Stream(listener.accept()[0], 60)
stream.receive_message(1 << 20)
asked = stream.receive_message(1 << 20)
file, sent, frame = MemoryFile(asked["size"]), 0, 1 << 16
for first, last in asked["ranges"]:
    for start in range(first, last, frame):
        stream.send_file(file.fd, 4096, min(frame, last - start))
        sent += frame
        time.sleep(pause)
        if sent == stop_after:
            print(sent, flush=True)
            sys.stdin.readline()
stream.wait_for_acknowledgement()
"""
"""A source that sends zeros, with pauses, and stops in the middle until it is told to go on."""


class Host:
    """A machine with a relay."""

    def __init__(self, machine: Any, seconds: float = 5.0) -> None:
        self.machine = machine
        self.name = machine.name
        command = [sys.executable, "-c", HOST, machine.address, seconds]
        self._process = start(machine, command)
        self._turn = asyncio.Lock()
        # Not one of asyncio's: there are few on a machine with few cores.
        self._thread = ThreadPoolExecutor(1, "host")

    def ready(self) -> "Host":
        """Wait until its process is there."""
        self.relay = json.loads(self._process.stdout.readline())
        assert not self.relay.pop("torch")
        return self

    def ask(self, do: str, **given: Any) -> Any:
        self._process.stdin.write(json.dumps([do, given]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ConnectionError(f"{self.name} has gone")
        return json.loads(line)

    def close(self) -> None:
        """Close the pipes to its process, which then ends."""
        close_pipes(self._process)
        self._thread.shutdown(wait=False)

    async def fetch(self, order: dict[str, Any]) -> list[int]:
        async with self._turn:
            ask = partial(self.ask, "order", **order)
            return location_in(await asyncio.get_running_loop().run_in_executor(self._thread, ask))

    def sent(self) -> int:
        """Bytes on its wire; without machines of its own kind, those that its relay has sent."""
        if self.machine.machines.stand_in:
            return self.ask("counts")[0]
        return self.machine.bytes_sent()

    def received(self) -> int:
        return self.ask("counts")[1]

    def read(self, handle: WeightHandle) -> str:
        """A checksum of what a process of this host reads."""
        [part] = handle.parts
        where = part.location
        location = [where.pid, where.fd, where.size, where.token]
        return self.ask("read", location=location, number=part.number, version=handle.version)


def start(machine: Any, command: list[Any]) -> Any:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    return machine.start(command, **pipes)


def close_pipes(process: Any) -> None:
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # what was written last was not read
            pipe.close()


class Slow:
    """A source on a machine that stops in the middle."""

    def __init__(self, machine: Any, *, stop_after: int = -1, pause: float = 0.0) -> None:
        self._process = start(
            machine, [sys.executable, "-c", SLOW, machine.address, stop_after, pause]
        )
        self.relay = json.loads(self._process.stdout.readline())

    def wait(self) -> None:
        """Wait until it has stopped."""
        assert self._process.stdout.readline()

    def close(self) -> None:
        close_pipes(self._process)

    def go_on(self) -> None:
        self._process.stdin.write("\n")
        self._process.stdin.flush()


class Rank:
    """A trainer's rank on a host. Its part has slots of a megabyte, each filled from a seed."""

    publishers = 0

    def __init__(self, host: Host, slots: int = SLOTS) -> None:
        Rank.publishers += 1
        self.host, self.publisher, self.number = host, Rank.publishers, 0
        self._seeds: list[int] = [-1] * slots
        self._changed = [0] * slots

    def publish(self, *seeds: int) -> WeightHandle:
        """Publish slots with these seeds; the last one is that of the slots that are left."""
        seeds = (*seeds, *[seeds[-1]] * (len(self._seeds) - len(seeds)))
        self.number += 1
        pairs = zip(self._seeds, seeds, self._changed, strict=True)
        self._changed = [last if old == new else self.number for old, new, last in pairs]
        self._seeds = list(seeds)
        given = {"slot": SLOT, "number": self.number, "version": self.number}
        location = ShmLocation(*self.host.ask("publish", seeds=seeds, **given))
        return handle_of(self.publisher, self.number, location, self._changed)


def handle_of(
    publisher: int, number: int, location: Any, changed: list[int], transport: str = "relay"
) -> WeightHandle:
    """A handle whose version is the number of the publication."""
    slots = tuple(
        Slot(str(n), (SLOT,), (0,), (SLOT,), torch.uint8, n * SLOT, SLOT)
        for n, _ in enumerate(changed)
    )
    part = Part(publisher, number, location, slots, tuple(changed))
    return WeightHandle(number, transport, (part,))


async def reach(handle: WeightHandle, home: Any, hosts: Sequence[Host], **given: Any) -> Spread:
    """Spread a handle to hosts, the trainer's not among them."""
    by_name = {host.name: host for host in hosts}
    relays = {host.name: host.relay for host in (home, *hosts)}
    return await spread(
        handle, [home.name], list(by_name), relays, lambda n, o: by_name[n].fetch(o), **given
    )
