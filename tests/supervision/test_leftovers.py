"""Nothing is left behind by an actor, however it ends. vLLM and the kills are real."""

import asyncio
import contextlib
import tempfile
from collections.abc import Iterable
from pathlib import Path

import psutil

from tests.supervision.actors import Sharer
from tests.support import small_engine
from tests.tasks.tools.tricky_tools import ended
from torchtitan_rl.config import GeneratorConfig
from torchtitan_rl.config.sampling import SamplingConfig
from torchtitan_rl.supervision.processes import started_by
from torchtitan_rl.supervision.spawn import spawn, spawn_generator

TWO_RANKS = GeneratorConfig(engine=small_engine(), tensor_parallel_degree=2, threads=1)
FOLDERS = (Path("/dev/shm"), Path(tempfile.gettempdir()))


def files_of(processes: list[psutil.Process]) -> set[Path]:
    """Files in these folders that the processes map or have open."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            paths = [m.path for m in process.memory_maps()] + [f.path for f in process.open_files()]
            found |= {Path(path) for path in paths}
    return {path for path in found if path.parent in FOLDERS}


async def gone(paths: Iterable[Path]) -> None:
    async with asyncio.timeout(10):  # Python's own cleaner may take a moment
        while any(path.exists() for path in paths):
            await asyncio.sleep(0.05)


async def test_an_actor_that_is_killed_leaves_no_shared_memory_and_no_temporary_file():
    sharer = await spawn(Sharer, env={}, own_temporary_folder=True)
    memory = FOLDERS[0] / await sharer.actor.make.call_one()
    file = Path(await sharer.actor.make_file.call_one())
    assert memory.exists()
    assert file.exists()
    sharer.processes[0].kill()
    await sharer.stop()
    await gone([memory, file.parent])
    assert FOLDERS[1].exists()


async def test_a_killed_tensor_parallel_generator_leaves_no_file_and_no_process(tiny_model):
    before = {path for folder in FOLDERS for path in folder.iterdir()}
    generator = await spawn_generator(TWO_RANKS, model=str(tiny_model), seed=0)
    started = started_by(generator.processes)
    assert len(started) >= 2  # a process for each rank
    sampling = SamplingConfig(max_tokens=4)
    assert await generator.actor.generate.call_one([[1, 2, 3]], sampling_config=sampling)
    made = files_of([*generator.processes, *started]) - before
    assert generator.temporary is not None
    assert list(generator.temporary.folder.iterdir())  # by which the ranks have met
    assert any("cpushm" in path.name for path in made)  # mapped, and without a name already:
    assert not [path for path in made if "cpushm" in path.name and path.exists()]
    generator.processes[0].kill()
    await generator.stop()
    assert all(map(ended, started_by(generator.processes)))
    assert all(map(ended, started))
    await gone({*made, generator.temporary.folder})
    idents = {path.name.partition("-")[0] for path in made if "cpushm" in path.name}
    left = {path for folder in FOLDERS for path in folder.iterdir()}
    assert not [path for path in left if path.name.partition("-")[0] in idents]
