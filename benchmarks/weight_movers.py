"""The two ends of weight_sync.py. In a module of its own: an actor's class must be importable in
the worker.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from monarch.actor import Actor, endpoint

from torchtitan_rl.weight_sync.handle import WeightHandle, whole_tensors
from torchtitan_rl.weight_sync.rdma import Inbox
from torchtitan_rl.weight_sync.reading import open_snapshot
from torchtitan_rl.weight_sync.snapshot import Publisher
from torchtitan_rl.weight_sync.transport import make_publisher

ROUNDS = 15
SIZES: dict[str, tuple[int, int, int, torch.dtype]] = {
    "0.6M parameters, fp32": (128, 384, 3, torch.float32),
    "135M parameters, fp32": (576, 1536, 30, torch.float32),
    "0.6B parameters, bf16": (1024, 3072, 28, torch.bfloat16),
}
VOCABULARY = {128: 272, 576: 49152, 1024: 151936}


def shapes(dim: int, hidden: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a decoder's tensors; only the number of bytes and of tensors matters."""
    named: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY[dim], dim)}
    for layer in range(layers):
        block = f"model.layers.{layer}"
        named |= {f"{block}.self_attn.{p}_proj.weight": (dim, dim) for p in "qo"}
        named |= {f"{block}.self_attn.{p}_proj.weight": (dim // 2, dim) for p in "kv"}
        named |= {f"{block}.mlp.{p}_proj.weight": (hidden, dim) for p in ("gate", "up")}
        named |= {f"{block}.mlp.down_proj.weight": (dim, hidden)}
        named |= {f"{block}.{p}_layernorm.weight": (dim,) for p in ("input", "post_attention")}
    return named


def median_seconds(
    work: Callable[[], object], before: Callable[[], object] = lambda: None
) -> float:
    taken = []
    for _ in range(ROUNDS + 2):
        before()
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[2:])


class Writer(Actor):
    """Has weights that change, and publishes them."""

    def __init__(self, case: str) -> None:
        *sizes, dtype = SIZES[case]
        self._case = case
        self._weights = {
            name: torch.randn(shape).to(dtype) for name, shape in shapes(*sizes).items()
        }
        nbytes = sum(t.numel() * t.itemsize for t in self._weights.values())
        self._source, self._target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        self._shards = whole_tensors(self._weights.items())  # the same every time, as a trainer's
        self._version = 0
        self._publisher: Publisher | None = None

    @endpoint
    async def memcpy_in_a_loop(self) -> float:
        """Seconds of one thread to copy as many bytes, again and again: if they fit, they never
        leave the CPU's cache."""
        return median_seconds(lambda: np.copyto(self._target, self._source))

    @endpoint
    async def memcpy(self) -> float:
        """Seconds of one memcpy, after the same preparations as in `publish`."""
        self._step()
        started = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - started

    def _step(self) -> None:
        """Change every tensor, as an optimizer does."""
        for tensor in self._weights.values():
            tensor.view(-1)[:1] += 1

    @endpoint
    async def open(self, transport: str, checksums: bool) -> None:
        threads = torch.get_num_threads()
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = make_publisher(transport, checksums=checksums, threads=threads)

    @endpoint
    async def publish(self) -> tuple[WeightHandle, float, float]:
        """Handle of a snapshot, seconds until the weights were free again, and seconds in all."""
        self._version += 1
        self._step()
        copied = []
        started = time.perf_counter()
        handle = self._publisher.publish(
            self._shards, self._version, copied=lambda: copied.append(time.perf_counter())
        )
        return handle, copied[0] - started, time.perf_counter() - started

    @endpoint
    async def plain_gloo(self, rank: int, size: int) -> dict[str, float]:
        return plain_gloo(self._weights, rank, size)


def plain_gloo(weights: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, float]:
    """Seconds until rank 0's tensors are at the others, by each way that plain gloo has."""
    meet = f"tcp://127.0.0.1:{29470 + size}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=size)
    tensors = [tensor.view(-1).view(torch.uint8) for tensor in weights.values()]
    whole = torch.ones(sum(map(len, tensors)), dtype=torch.uint8)

    def broadcast(sent: list[torch.Tensor]) -> None:
        """All at once: gloo has them all in flight."""
        for work in [dist.broadcast(tensor, 0, async_op=True) for tensor in sent]:
            work.wait()

    def send(sent: list[torch.Tensor]) -> None:
        peers = range(1, size) if rank == 0 else [0]
        how = dist.isend if rank == 0 else dist.irecv
        for work in [how(tensor, peer) for tensor in sent for peer in peers]:
            work.wait()

    ways = {
        "broadcast of one": lambda: broadcast([whole]),
        "send of one": lambda: send([whole]),
    }
    if size == 2:
        ways["broadcast of each tensor"] = lambda: broadcast(tensors)
        ways["send of each tensor"] = lambda: send(tensors)
    seconds = {way: median_seconds(work, before=dist.barrier) for way, work in ways.items()}
    dist.destroy_process_group()
    return seconds


class Reader(Actor):
    """Has room for the weights, and reads them."""

    def __init__(self, case: str) -> None:
        *sizes, dtype = SIZES[case]
        self._weights = {
            name: torch.zeros(shape, dtype=dtype) for name, shape in shapes(*sizes).items()
        }

    @endpoint
    async def open(self) -> None:
        self._inbox = Inbox()

    @endpoint
    async def read(self, handle: WeightHandle) -> tuple[float, float]:
        """Seconds until they are here, and until they are in tensors of our own."""
        started = time.perf_counter()
        here = await self._inbox.fetch(handle)
        with open_snapshot(here) as snapshot:
            fetched = time.perf_counter()
            snapshot.verify(threads=torch.get_num_threads())
            for name, tensor in snapshot.tensors():
                self._weights[name].copy_(tensor)
        return fetched - started, time.perf_counter() - started

    @endpoint
    async def plain_gloo(self, rank: int, size: int) -> dict[str, float]:
        return plain_gloo(self._weights, rank, size)
