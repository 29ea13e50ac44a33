"""The engine without an actor: in a process of its own, because vLLM patches the one it runs in."""

import os
import subprocess
import sys

from torchtitan_rl.platform import worker_env

SCRIPT = """
import asyncio, sys
from tests.support import small_engine
from torchtitan_rl.actors.engine import Engine, EngineDiedError, SamplingConfig
from torchtitan_rl.weight_sync.shm import ShmPublisher
import torch

engine = Engine(sys.argv[1], small_engine(), seed=0)
long, short = SamplingConfig(n=4, max_tokens=100), SamplingConfig(n=1, max_tokens=2)

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

    # What fails while an answer is put together fails the call that waits for it.
    engine._decoded = lambda call: 1 / 0
    try:
        await asyncio.wait_for(engine.generate([[3]], short, ["undecodable"]), 20)
    except Exception as error:
        print(type(error).__name__)
    del engine._decoded
    engine._dead = None

    # A swap that fails half-way ends the engine: nobody gets an answer of half-new weights.
    waiting = asyncio.create_task(engine.generate([[1, 2]], long, ["waiting"]))
    await asyncio.sleep(0.05)
    publisher = ShmPublisher()
    handle = publisher.publish([("model.norm.weight", torch.ones(128))], version=1)
    publisher.close()
    for call in (engine.pull_weights(handle), waiting, engine.generate([[3]], short, ["late"])):
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


def test_an_engine_by_itself_shares_cancels_and_dies_in_order(tiny_model):
    env = {**os.environ, **worker_env(1, role="generator"), "PYTHONPATH": os.getcwd()}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiny_model)],
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    died = "EngineDiedError"
    assert run.stdout.split()[-5:] == [died, "WeightSyncError", died, died, "closed"], run.stdout
