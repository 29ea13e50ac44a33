"""Environments and references that die: replaced, and nothing is lost. Processes and kills are
real."""

import asyncio
from dataclasses import replace

import pytest

from tests.low_tokens import Talkative
from tests.support import low_tokens, small_engine
from tests.tasks.tools.tricky_tools import Several
from torchtitan_rl.actors.interfaces import EnvironmentRequest
from torchtitan_rl.config import (
    EnvironmentConfig,
    GeneratorConfig,
    KLConfig,
    LossConfig,
    RolloutConfig,
    TrainerConfig,
)
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.supervision.environments import Environments
from torchtitan_rl.supervision.spawn import spawn_environment
from torchtitan_rl.tasks.tools.tool import ToolCall


@pytest.fixture(scope="module")
async def environments():
    config = EnvironmentConfig(timeout_seconds=3.0)
    made = Environments(lambda _: spawn_environment(config, Several.Config()))
    await made.start()
    yield made
    await made.stop()


def calls(name, *, seconds=None, **arguments):
    state = {"calls": 1, "log": []}
    return EnvironmentRequest("tricky", [], [ToolCall(name, arguments)], state, seconds)


def kill(pool):
    for process in pool.alive[0].spawned.processes:
        process.kill()


async def test_a_call_whose_environment_is_killed_is_made_again_within_its_time(environments):
    requests = [calls("wait", then="hang"), calls("count"), calls("count", seconds=0.2)]
    slow = asyncio.create_task(environments.respond(requests))
    while not environments.pool.replicas[0].calls:
        await asyncio.sleep(0)
    await asyncio.sleep(0.2)
    kill(environments.pool)
    waited, counted, late = await slow
    assert waited.outcomes == ["timed_out"]
    assert counted.state == {"calls": 2, "log": [""]}  # of the request's state: made once
    assert late.outcomes == ["timed_out"]  # its 0.2 s are not given to it a second time
    assert late.state == requests[2].state
    assert "out of time: the conversation may not last" in late.messages[0]["content"]
    assert environments.pool.take_deaths() == 1


async def test_the_request_that_kills_is_found_and_the_others_are_answered(environments):
    requests = [calls("count"), calls("wait", then="die"), calls("count")]
    first, deadly, last = await environments.respond(requests)
    assert [first.outcomes, deadly.outcomes, last.outcomes] == [["ok"], ["raised"], ["ok"]]
    assert deadly.failure.startswith("3 environments died over it, the last of them environment: ")
    assert deadly.state == requests[1].state
    assert environments.pool.take_deaths() == 3


async def test_a_run_goes_on_when_its_environment_and_its_reference_are_killed(
    tmp_path, tiny_model
):
    base = low_tokens()
    config = replace(
        base,
        model=str(tiny_model),
        task=Talkative.Config(),
        generator=GeneratorConfig(
            backend="simulated", sampling=base.generator.sampling, engine=small_engine()
        ),
        trainer=TrainerConfig(
            backend="simulated", threads=1, loss=LossConfig(ref_kl=KLConfig(coef=0.1))
        ),
        rollout=RolloutConfig(max_turns=2),
        prompts_per_step=4,
        evaluation=replace(base.evaluation, every=100),
        output_dir=str(tmp_path),
        run_name="run",
    )
    async with Controller(config) as controller:
        rows = [await controller.step(0)]
        kill(controller.actors.environments.pool)
        kill(controller.actors.references.pool)
        rows.append(await controller.step(1))
    assert [row["episodes"] for row in rows] == [16, 16]
    assert [row["turns/all/mean"] for row in rows] == [2, 2]
    assert [row["environment/died"] for row in rows] == [0, 1]
    assert [row["reference/died"] for row in rows] == [0, 1]
