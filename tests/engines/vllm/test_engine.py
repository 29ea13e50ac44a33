"""The engine without an actor: in a process of its own, because vLLM patches the one it runs in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.engines.vllm.changing_weights import GROWN, PROMPT
from tests.models.architectures import write_tiny
from tests.models.support import forward, titan_model
from torchtitan_rl.platform import worker_env

SCRIPT = """
import asyncio, sys
from threading import Event
from tests.engines.vllm.kernel_checks import check_kernels, check_model, check_other_version
check_other_version()  # before the worker is imported, which applies the patches
from tests.engines.vllm.direct_checks import check_direct_loads
from tests.support import small_engine
from torchtitan_rl.engines.vllm.engine import Engine, EngineDiedError, SamplingConfig
from torchtitan_rl.engines.vllm.worker import WorkerExtension
from torchtitan_rl.weight_sync.handle import whole_tensors
from torchtitan_rl.weight_sync.transport import make_publisher
from safetensors.torch import load_file
import torch

asyncio.run(check_direct_loads(sys.argv[2:5], sys.argv[5:]))
engine = Engine(sys.argv[1], small_engine(), seed=0)
check_kernels()
engine._engine.apply_model(check_model)
long, short = SamplingConfig(n=4, max_tokens=100), SamplingConfig(n=1, max_tokens=2)

def tokens_so_far():
    requests = engine._engine.engine_core.engine_core.scheduler.requests
    running = [s.vllm_id for s in engine._slots.values() if s.vllm_id in requests]
    return [requests[name].num_output_tokens for name in running] or [0]

async def main():
    # A short call does not wait for a long one: they share the batch.
    first = asyncio.create_task(engine.generate([[1, 2]], long, ["long"]))
    assert len(await engine.generate([[3]], short, ["short"])) == 1
    assert not first.done()

    # A cancelled call gives its slots back, whether it runs or is still queued.
    queued = asyncio.create_task(engine.generate([[1, 2]], long, ["queued"]))
    await asyncio.sleep(0)
    for call in (first, queued):
        call.cancel()
    await asyncio.gather(first, queued, return_exceptions=True)
    assert len(await engine.generate([[3]], short, ["after"])) == 1
    assert not engine._slots

    # By name too, from another process than the one that waits.
    named = asyncio.create_task(engine.generate([[1, 2]], long, ["named"]))
    while not engine._slots:
        await asyncio.sleep(0.001)
    await engine.cancel(["other"])
    assert engine._slots
    await engine.cancel(["named"])
    assert not engine._slots
    assert isinstance((await asyncio.gather(named, return_exceptions=True))[0], RuntimeError)

    # Weights swapped in flight: every token knows which ones sampled it.
    weights = make_publisher("shm")
    tensors = load_file(sys.argv[1] + "/model.safetensors")
    handle = weights.publish(whole_tensors(tensors.items()), version=1)
    across = asyncio.create_task(engine.generate([[1, 2]], long, ["across"]))
    while not engine._slots or min(tokens_so_far()) < 5:
        await asyncio.sleep(0.001)
    await engine.pull_weights(handle)
    crossed = [c for c in await across if c.token_versions]  # others had ended before
    assert crossed
    for completion in crossed:
        versions = completion.token_versions
        assert versions == sorted(versions) and set(versions) == {0, 1}
        assert len(versions) == len(completion.token_ids)
        assert versions.count(0) >= 5 and completion.policy_version == 0
    [after] = await engine.generate([[3]], short, ["new"])
    assert after.token_versions is None and after.policy_version == 1

    # Drained: requests in flight finish first, and new ones wait for the new weights.
    engine._config.drain = True
    handle = weights.publish(whole_tensors(tensors.items()), version=2)
    old = asyncio.create_task(engine.generate([[1, 2]], long, ["old"]))
    while not engine._slots:
        await asyncio.sleep(0.001)
    swap = asyncio.create_task(engine.pull_weights(handle))
    await asyncio.sleep(0)
    new = asyncio.create_task(engine.generate([[3]], short, ["later"]))
    assert {c.policy_version for c in await old} == {1}
    assert [c.policy_version for c in await new] == [2]
    assert swap.done() and all(c.token_versions is None for c in await old)
    engine._config.drain = False

    # Weights that travel are received beside the steps.
    travelling, going_on, opening = make_publisher("collective"), Event(), WorkerExtension._open
    WorkerExtension._open = lambda *how: (going_on.wait(20), opening(*how))[1]
    handle = travelling.publish(whole_tensors(tensors.items()), version=3)
    swap = asyncio.create_task(engine.pull_weights(handle))
    [meanwhile] = await engine.generate([[3]], short, ["meanwhile"])
    assert meanwhile.policy_version == 2 and not swap.done()
    going_on.set()
    await swap
    [after] = await engine.generate([[3]], short, ["received"])
    assert after.policy_version == 3
    WorkerExtension._open = opening

    # What fails while an answer is put together fails the call that waits for it.
    engine._decoded = lambda call: 1 / 0
    try:
        await asyncio.wait_for(engine.generate([[3]], short, ["undecodable"]), 20)
    except Exception as error:
        print(type(error).__name__)
    del engine._decoded
    engine._dead = None

    # Weights that are not the model's, torn, or gone are refused; the old ones go on being served.
    greedy = SamplingConfig(n=1, max_tokens=8, temperature=0.0)
    before = await engine.generate([[1, 2]], greedy, ["before"])
    narrow = {**tensors, "model.norm.weight": torch.ones(127)}
    lacking = {name: t for name, t in tensors.items() if name != "model.norm.weight"}
    for wrong in (narrow, lacking, {**tensors, "more": torch.ones(1)}):
        handle = make_publisher("shm").publish(whole_tensors(wrong.items()), version=7)
        try:
            await engine.pull_weights(handle)
        except Exception as error:
            print(type(error).__name__)
            print(error, file=sys.stderr)
    damaged = weights.publish(whole_tensors((n, t + 1) for n, t in tensors.items()), version=3)
    weights._newer.buffer.data[damaged.slots[2].offset] ^= 1
    gone = make_publisher("shm")
    closed = gone.publish(whole_tensors(tensors.items()), version=4)
    gone.close()
    lost = travelling.publish(whole_tensors(tensors.items()), version=4)
    travelling.close()
    for handle in (damaged, closed, lost):
        try:
            await engine.pull_weights(handle)
        except Exception as error:
            print(type(error).__name__)
            print(error, file=sys.stderr)
    [now] = await engine.generate([[1, 2]], greedy, ["now"])
    assert now.policy_version == 3 and now.token_logprobs == before[0].token_logprobs

    # A swap that fails half-way ends the engine: nobody gets an answer of half-new weights.
    waiting = asyncio.create_task(engine.generate([[1, 2]], long, ["waiting"]))
    await asyncio.sleep(0.05)
    WorkerExtension.load_staged = lambda self: 1 / 0
    whole = weights.publish(whole_tensors(tensors.items()), version=5)
    for call in (engine.pull_weights(whole), waiting, engine.generate([[3]], short, ["late"])):
        try:
            await asyncio.wait_for(call, 20)
        except Exception as error:
            print(type(error).__name__)
    engine.close()
    try:
        await asyncio.wait_for(engine.generate([[3]], short, ["closed"]), 20)
    except asyncio.TimeoutError:
        print("hangs")
    except EngineDiedError:
        print("closed")

asyncio.run(main())
"""


def assert_generated(folder: Path) -> None:
    """What the engine has generated has the logprobs of the trainer's model."""
    made = json.loads((folder / "generated.json").read_text())
    model, worst = titan_model(folder), 0.0
    for completions, factor in zip(made, (1, GROWN), strict=True):
        for weight in model.parameters():
            weight.data *= factor
        for token_ids, logprobs in completions:
            with torch.no_grad():
                logits = forward(model, torch.tensor([[*PROMPT, *token_ids]]))[0]
            ours = logits[len(PROMPT) - 1 : -1].log_softmax(-1)[range(len(token_ids)), token_ids]
            worst = max(worst, (ours - torch.tensor(logprobs)).abs().max().item())
    assert worst <= 1e-4, (folder.name, worst)


def test_an_engine_by_itself_loads_shares_cancels_and_dies_in_order(tiny_model, tmp_path):
    """Loads: with models whose output layer is the embedding, and is not, and with biases."""
    names = ("qwen3", "llama3", "qwen2", "mistral", "smollm3")
    folders = [write_tiny(name, tmp_path / name, tokenizer=tiny_model) for name in names]
    env = {**os.environ, **worker_env(1, role="generator"), "PYTHONPATH": os.getcwd()}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiny_model), *map(str, folders)],
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    for folder in folders:
        assert_generated(folder)
    died = "EngineDiedError"
    wrong = "WrongWeightsError"
    refused = [wrong, wrong, wrong, wrong, "StaleHandleError", "LinkError"]
    assert run.stdout.split()[-11:] == [died, *refused, died, died, died, "closed"], run.stdout
    # Each error names the tensor.
    for said in ("'model.norm.weight' of shape (127,)", "lacks 'model.norm.weight'", "has 'more'"):
        assert said in run.stderr
    assert "the bytes of model.layers.0" in run.stderr
    assert run.stderr.count("vLLM 0.33.0 runs without our CPU patches, which are for 0.32.0") == 1
