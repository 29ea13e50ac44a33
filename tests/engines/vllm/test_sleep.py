"""Engines that sleep: their memory is really given back, and they sample afterwards as if they had
never slept. In a process of its own, because vLLM patches the one it runs in."""

import os
import subprocess
import sys
from dataclasses import replace

from tests.models.architectures import write_tiny
from tests.support import small_engine
from torchtitan_rl.platform import worker_env

KV_GIB = 0.1
SCRIPT = """
import asyncio, gc, sys
import torch
from safetensors.torch import load_file
from tests.engines.vllm.test_sleep import KV_GIB, engine_config
from torchtitan_rl.config import SamplingConfig
from torchtitan_rl.engines.vllm.engine import Engine, EngineAsleepError
from torchtitan_rl.platform import memory_in_use, release_freed_memory
from torchtitan_rl.weight_sync.handle import StaleHandleError, whole_tensors
from torchtitan_rl.weight_sync.transport import make_publisher

SHORT, LONG = SamplingConfig(n=1, max_tokens=2), SamplingConfig(n=4, max_tokens=80)
CACHE = int(KV_GIB * 2**30)


class Served:
    def __init__(self, folder, dtype):
        self.engine = Engine(folder, engine_config(dtype), seed=0)
        self.publisher, self.dtype = make_publisher("shm"), getattr(torch, dtype)
        self.tensors = load_file(folder + "/model.safetensors")
        elements = sum(tensor.numel() for tensor in self.tensors.values())
        self.weights = elements * self.dtype.itemsize

    def publish(self, version):
        generator = torch.Generator().manual_seed(version)
        with_noise = [
            (name, tensor + 0.02 * torch.randn(tensor.shape, generator=generator))
            for name, tensor in self.tensors.items()
        ]
        return self.publisher.publish(whole_tensors(with_noise), version, dtype=self.dtype)

    async def sample(self):
        sampling = SamplingConfig(n=3, max_tokens=12)
        made = await self.engine.generate([list(range(40))], sampling, ["same"])
        assert {c.policy_version for c in made} == {self.engine.policy_version}
        return [(c.token_ids, c.token_logprobs) for c in made]


async def refused(call, error):
    try:
        await asyncio.wait_for(call, 20)
    except error as raised:
        return str(raised)
    raise AssertionError(f"{call} was not refused")


async def check_memory(served):
    # The publisher, which is in this process, keeps what it has published last.
    engine, weights, publish = served.engine, served.weights, served.publish
    publish(0)
    gc.collect()
    release_freed_memory()
    # The first sleep, before any weights were pulled: all that vLLM has allocated is given back.
    before = memory_in_use()
    given_back = await engine.sleep()
    asleep = memory_in_use()
    assert before - asleep >= 0.8 * (weights + CACHE), (before - asleep, weights, CACHE)
    assert abs(given_back - (before - asleep)) < 2**23
    assert await engine.sleep() == 0  # once more
    for version in range(2):
        await engine.wake(publish(version))
        assert memory_in_use() - asleep >= 0.8 * weights
        await served.sample()
        given_back = await engine.sleep()
        # Of the cache only what was written to had come back.
        assert given_back >= 0.8 * weights, (given_back, weights)
        left = memory_in_use() - asleep
        assert left <= 0.2 * (weights + CACHE), (left, weights, CACHE)
    await engine.wake(publish(3))


async def check_samples(served):
    # What it samples is what one samples that is awake, version by version, to the bit.
    engine, publish = served.engine, served.publish
    slept, awake = [], []
    for version in range(3):
        await engine.sleep()
        await engine.wake(publish(version))
        slept.append(await served.sample())
    for version in range(3):
        await engine.pull_weights(publish(version))
        awake.append(await served.sample())
    assert slept == awake
    assert len({str(made) for made in awake}) == 3  # the versions differ


async def check_refusals(served):
    # Whatever is under way as it goes to sleep ends with an error, and leaves nothing.
    engine, publish = served.engine, served.publish
    under_way = asyncio.create_task(engine.generate([[1, 2]], LONG, ["long"]))
    while not engine._slots:
        await asyncio.sleep(0.001)
    await engine.sleep()
    assert "put to sleep" in await refused(under_way, EngineAsleepError)
    assert not engine._slots
    said = await refused(engine.generate([[3]], SHORT, ["early"]), EngineAsleepError)
    assert "the engine is asleep" in said
    await refused(engine.pull_weights(publish(0)), EngineAsleepError)

    # Weights that cannot be read leave it asleep; others wake it.
    gone = make_publisher("shm")
    closed = gone.publish(whole_tensors(served.tensors.items()), 9, dtype=served.dtype)
    gone.close()
    await refused(engine.wake(closed), StaleHandleError)
    assert engine.state == "asleep"
    await engine.wake(publish(2))
    woken = await served.sample()
    await engine.wake(publish(2))  # woken already: it only pulls
    assert await served.sample() == woken

    engine._config.can_sleep = False
    await refused(engine.sleep(), ValueError)
    assert await served.sample() == woken


async def main():
    for number, case in enumerate(sys.argv[1:]):
        served = Served(*case.split(","))
        if served.weights > 2**25:  # else it is less than what comes and goes beside it
            await check_memory(served)
        await check_samples(served)
        if number == 0:  # it is the same for all
            await check_refusals(served)
        served.engine.close()
        print(case)


asyncio.run(main())
"""


def engine_config(dtype):
    return replace(small_engine(), dtype=dtype, kv_cache_gib=KV_GIB, can_sleep=True)


def test_sleeping_engines_give_their_memory_back_and_sample_as_if_they_had_not_slept(
    tiny_model, moe_model, tmp_path
):
    """Models whose weights are loaded directly, and by vLLM; two are of 27 million parameters, so
    that their weights can be told from noise."""
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    own = {"tokenizer": tiny_model, **wide}
    tied = write_tiny("llama", tmp_path / "tied", tie_word_embeddings=True, **own)
    untied = write_tiny("llama", tmp_path / "untied", attention_bias=True, **own)
    cases = [f"{tied},float32", f"{untied},bfloat16", f"{moe_model},float32"]
    env = {**os.environ, **worker_env(1, role="generator"), "PYTHONPATH": os.getcwd()}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *cases],
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert run.stdout.split() == cases
