"""Nothing is left behind by a tensor-parallel generator, however it ends. vLLM and the kills are
real."""

import asyncio
import contextlib
import os
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.support import small_engine
from tests.tasks.tricky_tools import ended
from torchtitan_rl.config import GeneratorConfig
from torchtitan_rl.config.sampling import SamplingConfig
from torchtitan_rl.supervision.processes import started_by
from torchtitan_rl.supervision.spawn import spawn_generator

TWO_RANKS = GeneratorConfig(engine=small_engine(), tensor_parallel_degree=2, threads=1)


def files_of(processes: list[psutil.Process]) -> set[Path]:
    """Files in /dev/shm and in the temporary folder that these processes map or have open."""
    folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            paths = [m.path for m in process.memory_maps()] + [f.path for f in process.open_files()]
            found |= {Path(path) for path in paths}
    return {path for path in found if path.parent in folders}


@pytest.mark.parametrize("killed", [True, False])
async def test_a_tensor_parallel_generator_leaves_no_file_and_no_process(tiny_model, killed):
    before = set(os.listdir("/dev/shm"))
    generator = await spawn_generator(TWO_RANKS, model=str(tiny_model), seed=0)
    started = started_by(generator.processes)
    assert len(started) >= 2  # a process for each rank
    sampling = SamplingConfig(max_tokens=4)
    assert await generator.actor.generate.call_one([[1, 2, 3]], sampling_config=sampling)
    made = files_of([*generator.processes, *started])
    assert any("cpushm" in path.name for path in made)  # mapped, and without a name already:
    assert not [path for path in made if "cpushm" in path.name and path.exists()]
    if killed:
        generator.processes[0].kill()
    await generator.stop()
    assert all(map(ended, started_by(generator.processes)))
    assert all(map(ended, started))
    async with asyncio.timeout(10):  # Python's own cleaner may take a moment
        while left := [path for path in made if path.exists()]:
            await asyncio.sleep(0.05)
    assert not left
    idents = {path.name.partition("-")[0] for path in made if "cpushm" in path.name}
    assert not [name for name in os.listdir(tempfile.gettempdir()) if name in idents]
    assert not [n for n in set(os.listdir("/dev/shm")) - before if n.partition("-")[0] in idents]
