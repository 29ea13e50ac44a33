"""Weights swapped while vLLM schedules ahead, as on a GPU: no batch is lost, none is mixed."""

import os
import subprocess
import sys

from torchtitan_rl.platform import worker_env

SCRIPT = """
import asyncio, math, sys
from dataclasses import replace
import torch
from safetensors.torch import load_file
from tests.cuda.async_scheduling import schedule_ahead
from tests.support import small_engine
import torchtitan_rl.engines.vllm.engine as module
from torchtitan_rl.config import SamplingConfig
from torchtitan_rl.engines.vllm.routing import ReturnedRouting
from torchtitan_rl.models.hf import read_hf_config
from torchtitan_rl.weight_sync.handle import whole_tensors
from torchtitan_rl.weight_sync.transport import make_publisher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

model = sys.argv[1]
schedule_ahead()
hf = read_hf_config(model)
module.make_routing_source = lambda engine, model: ReturnedRouting(hf)
engine = module.Engine(model, replace(small_engine(), return_routed_experts=True), seed=0)
core = engine._engine.engine_core.engine_core
assert isinstance(core.scheduler, AsyncScheduler) and core.batch_queue_size == 2
swap, under_way = engine._swap, []
engine._swap = lambda handle: (under_way.append(len(core.batch_queue)), swap(handle))
tensors = load_file(model + "/model.safetensors")
uniform = {name: torch.zeros_like(t) for name, t in tensors.items()}  # every token is as likely
publisher = make_publisher("shm")
sampling = SamplingConfig(n=4, max_tokens=100, logprobs=True)

def publish(version):
    made = uniform if version % 2 else tensors
    return publisher.publish(whole_tensors(made.items()), version)

def check(completion):
    versions = completion.token_versions or [completion.policy_version] * len(completion.token_ids)
    assert versions == sorted(versions)
    for version, logprob in zip(versions, completion.token_logprobs, strict=True):
        is_uniform = abs(logprob + math.log(hf["vocab_size"])) < 1e-4
        assert is_uniform == bool(version % 2), (version, logprob)
    tokens = len(completion.prompt_token_ids) + len(completion.token_ids)
    assert completion.routed_experts.shape[0] == tokens
    return set(versions)

async def some_tokens():
    while not any(r.num_output_tokens > 3 for r in list(core.scheduler.requests.values())):
        await asyncio.sleep(0.001)

async def swapped_in_flight(version):
    call = asyncio.create_task(engine.generate([[1, 2], [3]], sampling, ["a", str(version)]))
    await some_tokens()
    await engine.pull_weights(publish(version))
    return set().union(*map(check, await call))

async def main():
    for version in (1, 2, 3):
        assert await swapped_in_flight(version) == {version - 1, version}
    assert max(under_way) == 1, under_way

    # Requests that were cancelled may leave a batch behind, that nobody reads.
    call = asyncio.create_task(engine.generate([[1, 2]], sampling, ["cancelled"]))
    await some_tokens()
    await engine.cancel(["cancelled"])
    await engine.pull_weights(publish(4))
    await asyncio.gather(call, return_exceptions=True)
    [after] = await engine.generate([[1, 2]], replace(sampling, n=1), ["after"])
    assert check(after) == {4}

asyncio.run(main())
engine.close()
print("served")
"""


def test_batches_under_way_are_finished_before_weights_are_swapped(moe_model):
    env = {**os.environ, **worker_env(1, role="generator")}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(moe_model)],
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split()[-1] == "served"
