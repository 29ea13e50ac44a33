"""The two ends of weight_sync.py. In a module of its own: an actor's class must be importable in
the worker.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
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
    """Those of a decoder; what counts is how many bytes there are, in how many tensors."""
    named: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY[dim], dim)}
    for layer in range(layers):
        block = f"model.layers.{layer}"
        named |= {f"{block}.self_attn.{p}_proj.weight": (dim, dim) for p in "qo"}
        named |= {f"{block}.self_attn.{p}_proj.weight": (dim // 2, dim) for p in "kv"}
        named |= {f"{block}.mlp.{p}_proj.weight": (hidden, dim) for p in ("gate", "up")}
        named |= {f"{block}.mlp.down_proj.weight": (dim, hidden)}
        named |= {f"{block}.{p}_layernorm.weight": (dim,) for p in ("input", "post_attention")}
    return named


def median_seconds(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(ROUNDS + 2):
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
        """The same once, with all that comes before it as in `publish`."""
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
        """With the seconds until the weights were free again, and until it was done."""
        self._version += 1
        self._step()
        copied = []
        started = time.perf_counter()
        handle = self._publisher.publish(
            self._shards, self._version, copied=lambda: copied.append(time.perf_counter())
        )
        return handle, copied[0] - started, time.perf_counter() - started

    @endpoint
    async def send(self, rank: int) -> None:
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
        for _ in range(ROUNDS + 2):
            exchange([torch.distributed.isend], self._weights, peer=1 - rank)


def exchange(how: list, weights: dict[str, torch.Tensor], peer: int) -> None:
    """All tensors at once: gloo has them all in flight."""
    for work in [how[0](tensor.view(torch.uint8), peer) for tensor in weights.values()]:
        work.wait()


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
        """Seconds to bring them here, and all in all into tensors of our own."""
        started = time.perf_counter()
        here = await self._inbox.fetch(handle)
        fetched = time.perf_counter()
        with open_snapshot(here) as snapshot:
            snapshot.verify(threads=torch.get_num_threads())
            for name, tensor in snapshot.tensors():
                self._weights[name].copy_(tensor)
        return fetched - started, time.perf_counter() - started

    @endpoint
    async def receive(self, rank: int) -> float:
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
        return median_seconds(
            lambda: exchange([torch.distributed.irecv], self._weights, peer=1 - rank)
        )
