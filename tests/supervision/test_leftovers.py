"""Nothing is left behind by an actor, however it ends. The kill is real; that of a tensor-parallel
generator is in tests/engines/vllm/test_tensor_parallel.py, which has one."""

import asyncio
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.supervision.actors import Sharer
from torchtitan_rl.supervision.spawn import spawn


async def gone(paths: Iterable[Path]) -> None:
    async with asyncio.timeout(10):  # Python's own cleaner may take a moment
        while any(path.exists() for path in paths):
            await asyncio.sleep(0.05)


async def test_an_actor_that_is_killed_leaves_no_shared_memory_and_no_temporary_file():
    sharer = await spawn(Sharer, env={}, own_temporary_folder=True)
    memory = Path("/dev/shm") / await sharer.actor.make.call_one()
    file = Path(await sharer.actor.make_file.call_one())
    assert memory.exists()
    assert file.exists()
    sharer.processes[0].kill()
    await sharer.stop()
    await gone([memory, file.parent])
    assert Path(tempfile.gettempdir()).exists()
