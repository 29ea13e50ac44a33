"""A generator of two ranks with a slice of the model each."""

import pytest

from tests.engines.vllm.changing_weights import DENSE, PROMPT, assert_served, states
from tests.support import small_engine
from torchtitan_rl.config import GeneratorConfig, SamplingConfig
from torchtitan_rl.supervision.spawn import spawn_generator
from torchtitan_rl.weight_sync.handle import whole_tensors
from torchtitan_rl.weight_sync.transport import make_publisher

TWO_RANKS = GeneratorConfig(
    backend="tests.engines.vllm.open_generator:OpenGenerator",
    sampling=SamplingConfig(n=2, max_tokens=6),
    engine=small_engine(),
    tensor_parallel_degree=2,
    threads=1,
)


@pytest.fixture(scope="module")
async def generator(tiny_model):
    generator = await spawn_generator(TWO_RANKS, model=str(tiny_model), seed=0)
    yield generator
    await generator.stop()


async def test_ranks_that_load_only_what_changed_serve_the_trainers_policy(
    generator, tiny_model, tmp_path
):
    publisher, made, served = make_publisher("shm"), [], None
    for version, tensors in enumerate(states(tiny_model, DENSE)):
        handle = publisher.publish(whole_tensors(tensors.items()), version)
        await generator.actor.pull_weights.call_one(handle)
        completions = await generator.actor.generate.call_one([PROMPT], group_ids=[f"{version}"])
        made.append((handle.changed_since(served), completions))
        served = handle
    publisher.close()
    assert_served(tiny_model, DENSE, made, tmp_path)
    # Slices are loaded by vLLM.
    assert await generator.actor.loads_directly.call_one() == [False, False]
