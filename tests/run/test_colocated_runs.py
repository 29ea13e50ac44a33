"""Order of the turns that generators and trainer take, with simulated actors.

test_whole_runs.py has a run of real ones, which are killed.
"""

import asyncio
from dataclasses import replace

import pytest

from tests.run.test_async_runs import config_for
from torchtitan_rl.config import (
    CheckpointConfig,
    EvaluationConfig,
    RolloutConfig,
    SamplingConfig,
    WeightSyncConfig,
)
from torchtitan_rl.core.waiting import Interrupted
from torchtitan_rl.observability.json_lines import read_lines
from torchtitan_rl.rollout.episodes import make_batch
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.run.warm_start import judge


async def run(config, disturb=None):
    async with Controller(config) as controller:
        if disturb:
            disturb(controller)
        await controller.run()
    return controller


def simulated(folder, model, **changes):
    return config_for(
        folder,
        model,
        simulated=True,
        placement="colocated",
        checkpoint=CheckpointConfig(every=1),
        **changes,
    )


class Sides:
    """Turns in the order they changed."""

    def __init__(self, controller):
        self.seen = []
        for side in ("trainer", "generators"):
            setattr(controller.turns, side, self.noting(controller.turns, side))

    def noting(self, turns, side):
        begin = getattr(turns, side)

        async def note():
            if turns._turn != side:
                self.seen.append(side)
            await begin()

        return note


async def test_groups_that_run_by_themselves_start_when_the_generators_are_awake(
    tmp_path, tiny_model
):
    """Asleep they would refuse to sample; and a checkpoint is saved after each step."""
    config = simulated(
        tmp_path,
        tiny_model,
        sampling=SamplingConfig(n=2, max_tokens=2),
        steps=3,
        rollout=RolloutConfig(max_groups_per_step=64, oversample=1),
    )
    controller = await run(config)
    assert controller.steps_done == 3
    files = [file for file in tmp_path.glob("run/rollouts/*") if "evaluation" not in file.name]
    records = [record for file in files for _, record in read_lines(file)]
    assert len({r["group"] for r in records if r["split"] == "train"}) == 3 * 4
    assert not [r for r in records if "asleep" in (r["failure"] or "")]


async def test_the_sides_change_no_more_often_than_they_must(tmp_path, tiny_model):
    config = simulated(tmp_path, tiny_model, steps=3)
    config = replace(config, evaluation=EvaluationConfig(every=2, prompts=4))
    seen = []
    await run(config, lambda controller: seen.append(Sides(controller)))
    # Three steps, each with its checkpoint; the last evaluation and the export.
    assert seen[0].seen == ["generators", "trainer"] * 4


async def test_steps_without_rollouts_keep_the_trainers_turn(tmp_path, tiny_model):
    """A warm start takes such steps before it judges what the model has learned."""
    config = simulated(tmp_path, tiny_model, steps=3)
    async with Controller(config) as controller:
        await controller.turns.generators()
        [group] = await controller.grade(await controller.roll_out(controller.prompts(0)))
        batch = make_batch(controller.annotate(group), keep_zero_advantages=True)
        sides = Sides(controller)
        for _ in range(3):
            await controller.train(batch.episodes)
            controller.steps_done += 1
        assert sides.seen == ["trainer"]
        await judge(controller)
        assert sides.seen == ["trainer", "generators"]
        controller.rollout_log.close()


@pytest.mark.parametrize(("moment", "streams"), [(0.1, False), (0.5, True)])
async def test_ctrl_c_at_any_moment_of_a_step_saves_in_the_trainers_turn(
    tmp_path, tiny_model, streams, moment
):
    """While the generators wake, which takes 0.2 s, and while they sample."""
    config = simulated(
        tmp_path,
        tiny_model,
        steps=100,
        rollout=RolloutConfig(oversample=1 if streams else 0),
    )
    kwargs = {"seconds_per_pull": 0.2, "seconds_per_token": 0.1}
    config = replace(config, generator=replace(config.generator, kwargs=kwargs))
    reported, controllers = [], []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    def disturb(controller):
        controllers.append(controller)
        asyncio.get_running_loop().call_later(moment, controller.interrupted.set)

    with pytest.raises(Interrupted):
        await run(config, disturb)
    [controller] = controllers
    assert controller.turns._turn == "trainer"
    assert controller.actors.generators.state == "asleep"
    assert not reported


def test_settings_that_need_both_sides_at_once_are_refused(tmp_path, tiny_model):
    with pytest.raises(ValueError, match="is colocated, and max_offpolicy_steps is 1: actors that"):
        simulated(tmp_path, tiny_model, max_offpolicy_steps=1)
    config = simulated(tmp_path, tiny_model)
    rdma = replace(config.trainer, weight_sync=WeightSyncConfig(transport="rdma"))
    with pytest.raises(ValueError, match=r"is colocated, and .*weight_sync\.transport is rdma:"):
        replace(config, trainer=rdma)


def test_a_run_from_rollouts_has_no_turns(tiny_model, tmp_path):
    config = simulated(tmp_path, tiny_model)
    assert config.colocated
    assert not replace(config, rollout=RolloutConfig(train_from=str(tmp_path))).colocated
