"""A generator that says how its ranks load weights."""

from monarch.actor import concurrent_endpoint

from torchtitan_rl.actors.generator import VLLMGenerator


def loads_directly(worker) -> bool:
    return worker.direct is not None


class OpenGenerator(VLLMGenerator):
    @concurrent_endpoint
    async def loads_directly(self) -> list[bool]:
        """By rank: whether weights are loaded without vLLM's help."""
        engine = self.engine
        return await engine._between_steps(lambda: engine._engine.collective_rpc(loads_directly))
