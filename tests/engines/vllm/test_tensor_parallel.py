"""A generator of two ranks with a slice of the model each: what it serves, and what is left of it
when it is killed."""

import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.engines.vllm.changing_weights import DENSE, PROMPT, assert_served, states
from tests.models.architectures import write_tiny
from tests.supervision.test_leftovers import gone
from tests.support import small_engine
from tests.tasks.tools.tricky_tools import ended
from torchtitan_rl.config import GeneratorConfig, SamplingConfig
from torchtitan_rl.hosts.host import LocalProcesses
from torchtitan_rl.hosts.watched import started_by
from torchtitan_rl.supervision.spawn import spawn_generator
from torchtitan_rl.weight_sync.handle import whole_tensors
from torchtitan_rl.weight_sync.transport import make_publisher

TWO_RANKS = GeneratorConfig(
    backend="tests.engines.vllm.open_generator:OpenGenerator",
    sampling=SamplingConfig(n=2, max_tokens=6),
    engine=replace(small_engine(), can_sleep=True),
    tensor_parallel_degree=2,
    threads=1,
)
FOLDERS = (Path("/dev/shm"), Path(tempfile.gettempdir()))


def files() -> set[Path]:
    return {path for folder in FOLDERS for path in folder.iterdir()}


def files_of(processes: list[psutil.Process]) -> set[Path]:
    """Files in these folders that the processes map or have open."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            paths = [m.path for m in process.memory_maps()] + [f.path for f in process.open_files()]
            found |= {Path(path) for path in paths}
    return {path for path in found if path.parent in FOLDERS}


@pytest.fixture(scope="module")
def before():
    """Files that others have made."""
    return files()


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    """A model with tensors of every kind: matrices that ranks have rows or columns of, norms that
    all have, and biases that they have parts of."""
    folder = tmp_path_factory.mktemp("models") / "qwen2"
    return write_tiny("qwen2", folder, tokenizer=tiny_model, tie_word_embeddings=True)


@pytest.fixture(scope="module")
async def generator(model, before):
    generator = await spawn_generator(TWO_RANKS, model=str(model), seed=0)
    yield generator
    await generator.stop()


@pytest.mark.parametrize("transport", ["shm", "collective"])
async def test_ranks_that_load_only_what_changed_serve_the_trainers_policy(
    generator, model, tmp_path, transport
):
    publisher, made, served = make_publisher(transport), [], None
    for version, tensors in enumerate(states(model, DENSE)):
        handle = publisher.publish(whole_tensors(tensors.items()), version)
        await generator.actor.pull_weights.call_one(handle)
        completions = await generator.actor.generate.call_one([PROMPT], group_ids=[f"{version}"])
        loaded = handle.changed_since(served)
        made.append((loaded, completions))
        received = await generator.actor.received_bytes.call_one()
        assert sum(received) == (sent(handle, loaded) if transport == "collective" else 0)
        assert max(received) <= 0.6 * handle.nbytes
        served = handle
    publisher.close()
    assert_served(model, DENSE, made, tmp_path)
    # Slices are loaded by vLLM.
    assert await generator.actor.loads_directly.call_one() == [False, False]


async def test_ranks_sleep_and_wake_with_the_newest_weights(generator, model):
    actor, publisher = generator.actor, make_publisher("shm")

    async def sample():
        completions = await actor.generate.call_one([PROMPT], group_ids=["same"])
        return [(c.token_ids, c.token_logprobs) for c in completions]

    # From its start on each rank has had all of its half of the cache.
    assert await actor.sleep.call_one() >= 0.8 * TWO_RANKS.engine.kv_cache_gib * 2**30
    slept = []
    for version, tensors in enumerate(states(model, DENSE[:2])):
        await actor.sleep.call_one()
        handle = publisher.publish(whole_tensors(tensors.items()), version)
        assert await actor.wake.call_one(handle) == version
        slept.append(await sample())
    for version, tensors in enumerate(states(model, DENSE[:2])):
        handle = publisher.publish(whole_tensors(tensors.items()), version)
        await actor.pull_weights.call_one(handle)
        assert await sample() == slept[version]
    publisher.close()


def sent(handle, names) -> int:
    """Bytes for both ranks: each row or column of a matrix to one of them, each norm to both."""
    slots = [slot for slot in handle.slots if slot.name in names]
    return sum(slot.nbytes * (2 if "norm" in slot.name else 1) for slot in slots)


async def test_killed_it_leaves_no_file_and_no_process(generator, before):
    """The last test of this module."""
    started = started_by(generator.processes)
    assert len(started) >= 2  # a process for each rank
    made = files_of([*generator.processes, *started]) - before
    [part] = generator.parts
    assert isinstance(part, LocalProcesses)
    assert part.temporary is not None
    temporary = part.temporary.folder
    assert list(temporary.iterdir())  # by which the ranks have met
    assert any("cpushm" in path.name for path in made)  # mapped, and without a name already:
    assert not [path for path in made if "cpushm" in path.name and path.exists()]
    generator.processes[0].kill()
    await generator.stop()
    assert all(map(ended, started_by(generator.processes)))
    assert all(map(ended, started))
    await gone({*made, temporary})
    idents = {path.name.partition("-")[0] for path in made if "cpushm" in path.name}
    assert not [path for path in files() if path.name.partition("-")[0] in idents]
