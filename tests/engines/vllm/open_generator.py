"""A generator that says how its ranks load weights."""

from monarch.actor import concurrent_endpoint

from torchtitan_rl.actors.generator import VLLMGenerator


def loads_directly(worker) -> bool:
    return worker.direct is not None


def received_bytes(worker) -> int:
    return worker.received_bytes


class OpenGenerator(VLLMGenerator):
    @concurrent_endpoint
    async def loads_directly(self) -> list[bool]:
        """Whether each rank loads weights without vLLM's loader."""
        engine = self.engine
        return await engine._between_steps(lambda: engine._engine.collective_rpc(loads_directly))

    @concurrent_endpoint
    async def received_bytes(self) -> list[int]:
        """By rank: bytes that were sent to it for the last weights."""
        engine = self.engine
        return await engine._between_steps(lambda: engine._engine.collective_rpc(received_bytes))
