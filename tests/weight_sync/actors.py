"""A process that publishes and one that reads, by any transport."""

from pathlib import Path

import torch
from monarch.actor import Actor, endpoint
from safetensors.torch import load_file, save_file

from torchtitan_rl.weight_sync.handle import WeightHandle, whole_tensors
from torchtitan_rl.weight_sync.rdma import Inbox
from torchtitan_rl.weight_sync.reading import open_snapshot
from torchtitan_rl.weight_sync.transport import make_publisher


def values(seed: int, size: int) -> dict[str, torch.Tensor]:
    """Tensors that everyone can make; `frozen` does not depend on the seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "frozen": torch.arange(float(size)),
        "w": torch.randn(size // 100, 100, generator=generator),
        "half": torch.randn(size, generator=generator).bfloat16(),
        "scalar": torch.tensor(float(seed)),
    }


class Writer(Actor):
    def __init__(self, transport: str, folder: str, size: int) -> None:
        self._transport, self._folder, self._size = transport, folder, size

    @endpoint
    async def open(self) -> None:
        self._publisher = make_publisher(self._transport, folder=self._folder)

    @endpoint
    async def publish(self, seed: int, version: int) -> WeightHandle:
        tensors = values(seed, self._size)
        return self._publisher.publish(whole_tensors(tensors.items()), version)

    @endpoint
    async def damage(self, handle: WeightHandle) -> None:
        """Flip a bit of `w` in the newest snapshot."""
        [slot] = [slot for slot in handle.slots if slot.name == "w"]
        if self._transport != "file":
            self._publisher._newer.buffer.data[slot.offset] ^= 1
            return
        file = Path(handle.parts[0].location.path)
        tensors = load_file(file)
        tensors["w"].view(torch.uint8)[0, 0] ^= 1
        save_file(tensors, file, metadata={"version": str(handle.version)})


class Reader(Actor):
    @endpoint
    async def open(self) -> None:
        self._inbox = Inbox()

    @endpoint
    async def read(self, handle: WeightHandle) -> dict[str, torch.Tensor]:
        with open_snapshot(await self._inbox.fetch(handle)) as snapshot:
            snapshot.verify()
            return {name: t.clone() for name, t in snapshot.tensors()}
