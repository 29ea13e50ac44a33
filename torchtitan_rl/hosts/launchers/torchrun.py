"""Hosts on which torchrun has started the training command: each lends its machine to rank 0.

    torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint node0:29500 \\
        -m torchtitan_rl.train --config grpo_sum_digits_tiny

Rank 0 becomes the controller. The first process of every node starts a worker; further processes of
a node only wait. They find each other by torchrun's own store.
"""

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torchtitan_rl.config.cluster import ClusterConfig
from torchtitan_rl.hosts.addresses import join_address
from torchtitan_rl.hosts.launchers.launcher import LaunchError
from torchtitan_rl.hosts.launchers.started import StartedWorker
from torchtitan_rl.hosts.secret import new_secret

VARIABLE = "TORCHELASTIC_RUN_ID"
OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
PREFIXES = ("MASTER_", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC")
"""Variables of torchrun, which are not for the actors: these have ranks of their own."""
STORE_SECONDS = 300.0
"""How long to wait for another node."""
LOOK_SECONDS = 1.0
"""How often a node looks whether the run has ended."""
PREFIX = "torchtitan_rl"


@dataclass(frozen=True, slots=True)
class Node:
    """A process that torchrun has started, and its place among all of them."""

    rank: int
    local_rank: int
    number: int
    """Number of the node."""
    nodes: int
    address: str
    """Address or name of the store."""
    port: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Node":
        rank, each = int(environment["RANK"]), int(environment["LOCAL_WORLD_SIZE"])
        return cls(
            rank=rank,
            local_rank=int(environment["LOCAL_RANK"]),
            number=rank // each,
            nodes=int(environment["WORLD_SIZE"]) // each,
            address=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
        )

    def store(self) -> Any:
        """The store that all nodes share, with keys of this library's own."""
        from torch.distributed import PrefixStore, TCPStore

        try:
            store = TCPStore(
                self.address,
                self.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=STORE_SECONDS),
            )
        except RuntimeError as error:
            raise LaunchError(
                f"torchrun's store at {self.address} port {self.port} cannot be reached: {error}"
            ) from error
        # What an attempt before has left there is not for this one.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"{PREFIX}/{attempt}", store)

    def own_address(self) -> str:
        """Address of this machine towards the store's."""
        found = socket.getaddrinfo(self.address, self.port, type=socket.SOCK_DGRAM)
        family, _, _, _, place = found[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing: the kernel only chooses the way
            return str(probe.getsockname()[0])

    def stores_address(self) -> str:
        """Address of the store, as this machine knows it."""
        return str(socket.getaddrinfo(self.address, self.port)[0][4][0])


class TorchrunHosts:
    """The nodes of a torchrun, seen by rank 0."""

    def __init__(self, config: ClusterConfig) -> None:
        if VARIABLE not in os.environ:
            raise LaunchError(
                "cluster.launcher is torchrun, which has not started this process: torchrun "
                "--nnodes 2 ... -m torchtitan_rl.train --config <recipe>"
            )
        self._node = Node.from_environment(os.environ)
        self._port = config.port
        self.secret = new_secret()
        self._store: Any = None
        self._own: StartedWorker | None = None

    def describe(self) -> list[str]:
        return [f"use a worker on each of the {self._node.nodes} nodes of torchrun"]

    async def start(self) -> list[str]:
        node = self._node
        self._store = await asyncio.to_thread(node.store)
        self._store.set("secret", self.secret)
        address = node.own_address()
        if node.nodes > 1:
            # This machine may know its own name as an address of the loopback; node 1 does not.
            address = await _value(self._store, "address_of_0", "node 1 of torchrun")
        self._own = started_worker(address, self._port, self.secret)
        places = [await self._own.start()]
        for number in range(1, node.nodes):
            who = f"the worker of node {number} of torchrun"
            places.append(await _value(self._store, f"place_of_{number}", who))
        if errors := [place for place in places if place.startswith("error: ")]:
            raise LaunchError("; ".join(errors))
        return places

    def why_gone(self, number: int) -> str:
        return ""

    async def stop(self) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # it has gone with torchrun
                self._store.set("ended", "")
        if self._own is not None:
            await self._own.stop()


def lend(node: Node, port: int) -> int:
    """Lend this machine to rank 0 until the run has ended; returns the exit code of the process."""
    store = node.store()
    if node.local_rank == 0:
        return asyncio.run(_lend(node, store, port))
    while not _ended(store):
        time.sleep(LOOK_SECONDS)
    return 0


async def _lend(node: Node, store: Any, port: int) -> int:
    if node.number == 1:
        store.set("address_of_0", node.stores_address())
    secret = await _value(store, "secret", "rank 0 of torchrun")
    worker = started_worker(node.own_address(), port, secret)
    try:
        place = await worker.start()
    except LaunchError as error:
        store.set(f"place_of_{node.number}", f"error: node {node.number}: {error}")
        return 1
    store.set(f"place_of_{node.number}", place)
    try:
        while not await asyncio.to_thread(_ended, store):
            await asyncio.sleep(LOOK_SECONDS)
    finally:
        await worker.stop()
    return 0


async def _value(store: Any, key: str, who: str) -> str:
    """What another node has put into the store; an error names it if it does not do so in time."""
    end = time.monotonic() + STORE_SECONDS
    try:
        while not store.check([key]):
            if time.monotonic() > end:
                raise LaunchError(f"waited {STORE_SECONDS:.0f} s for {who}")
            await asyncio.sleep(LOOK_SECONDS / 5)
        return str(store.get(key).decode())
    except RuntimeError as error:
        raise LaunchError(f"torchrun's store has gone while waiting for {who}: {error}") from error


def _ended(store: Any) -> bool:
    """Whether the run has ended, or torchrun's store with it."""
    try:
        return bool(store.check(["ended"]))
    except RuntimeError:
        return True


def started_worker(address: str, port: int, secret: str) -> StartedWorker:
    """A worker on this machine, for actors that know nothing of torchrun."""

    def command(port: int) -> list[str]:
        place = join_address(address, port)
        return [sys.executable, "-m", "torchtitan_rl", "worker", "--address", place, "--stdin"]

    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in OWN and not name.startswith(PREFIXES)
    }
    return StartedWorker(address, command, secret, port=port, environment=environment)
