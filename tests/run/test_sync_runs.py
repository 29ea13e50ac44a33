"""Weights under way while the next step trains, and what becomes of a run when they do not come."""

import asyncio
import itertools
from dataclasses import replace

import pytest

from tests.run.test_async_runs import config_for, steps
from torchtitan_rl.config import WeightSyncConfig
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.weight_sync.handle import WrongWeightsError


def simulated(folder, model, *, ahead, pull, publish=0.0, steps=4):
    config = config_for(folder, model, simulated=True, steps=steps + 2, max_offpolicy_steps=ahead)
    return replace(
        config,
        generator=replace(config.generator, kwargs={"seconds_per_pull": pull}),
        trainer=replace(config.trainer, kwargs={"seconds_per_publish": publish}),
    )


class Events:
    """What the actors were asked and have answered, in order."""

    def __init__(self, controller):
        self.seen = []
        self._call, controller.call = controller.call, self.call
        self._pull, controller.actors.generators.pull = controller.actors.generators.pull, self.pull

    async def call(self, who, what, reply):
        self.seen.append(f"{what} asked")
        answered = await self._call(who, what, reply)
        self.seen.append(f"{what} answered")
        return answered

    async def pull(self, handle):
        await self._pull(handle)
        self.seen.append("pulled")


@pytest.mark.parametrize("ahead", [0, 1])
async def test_the_next_step_trains_before_generators_have_the_weights_only_if_it_may(
    tmp_path, tiny_model, ahead
):
    recorded = []

    async def record(controller):
        recorded.append(Events(controller))
        await asyncio.Event().wait()

    config = simulated(tmp_path, tiny_model, ahead=ahead, pull=0.3)
    rows, controller = await steps(config, 4, record)
    order = [event for event in recorded[0].seen if event in ("train asked", "pulled")]
    overlapped = any(a == b == "train asked" for a, b in itertools.pairwise(order))
    assert overlapped == bool(ahead)
    assert [row["policy_version"] for row in rows] == [1, 2, 3, 4]
    assert max(row["policy_age/all/max"] for row in rows) <= ahead
    # At most one is under way: a step whose weights still travel holds the one after the next up.
    assert controller.sync.version >= 3


@pytest.mark.parametrize("ahead", [0, 1])
async def test_a_sync_that_fails_ends_the_run_with_its_error(tmp_path, tiny_model, ahead):
    async def spoil(controller):
        async def pull(handle):
            await asyncio.sleep(0.05)
            raise WrongWeightsError("policy version 1 lacks 'model.norm.weight'")

        controller.actors.generators.pull = pull
        await asyncio.Event().wait()

    config = simulated(tmp_path, tiny_model, ahead=ahead, pull=0.0)
    with pytest.raises(WrongWeightsError, match=r"lacks 'model.norm.weight'"):
        await asyncio.wait_for(steps(config, 4, spoil), 60)


async def test_an_evaluation_waits_for_the_newest_weights(tmp_path, tiny_model):
    config = simulated(tmp_path, tiny_model, ahead=1, pull=0.3, steps=3)
    config = replace(config, evaluation=replace(config.evaluation, every=1))
    seen = []

    async def watch(controller):
        evaluate = controller.roll_out

        async def roll_out(prompts):
            if prompts is controller.heldout:
                seen.append((controller.policy_version, controller.sync.version))
            return await evaluate(prompts)

        controller.roll_out = roll_out
        await asyncio.Event().wait()

    await steps(config, 3, watch)
    assert [trained for trained, _ in seen][-2:] == [1, 2]
    assert all(trained == served for trained, served in seen)


def test_a_folder_that_cannot_be_made_is_refused_before_anything_starts(tmp_path, tiny_model):
    config = simulated(tmp_path, tiny_model, ahead=1, pull=0.0)
    config.trainer.weight_sync = WeightSyncConfig(
        transport="file", folder=str(tiny_model / "config.json" / "weights")
    )
    with pytest.raises(ValueError, match=r"config\.json cannot be written to \(Not a directory\)"):
        Controller(config)


@pytest.mark.parametrize(("off", "dtype"), [(0.002, "float32"), (0.6, "bfloat16")])
async def test_generators_that_serve_other_weights_are_found_out(tmp_path, tiny_model, off, dtype):
    config = simulated(tmp_path, tiny_model, ahead=1, pull=0.0)
    engine = replace(config.generator.engine, dtype=dtype)
    config = replace(
        config,
        generator=replace(config.generator, engine=engine),
        trainer=replace(config.trainer, weight_sync=WeightSyncConfig(check=True)),
    )

    async def spoil(controller):
        async def measure(episodes):
            assert {tuple(e.prompt_token_ids) for e in episodes} == {tuple(controller.sync._probe)}
            return {"mismatch/all/max": off if controller.sync.version else 0.0}

        controller.sync._measure = measure
        await asyncio.Event().wait()

    async with asyncio.timeout(60):
        controller = Controller(config)
        spoiling = asyncio.ensure_future(spoil(controller))
        await asyncio.sleep(0)
        with pytest.raises(WrongWeightsError, match=rf"version 1 .* are off by {off}"):
            async with controller:
                await controller.step(0)
        spoiling.cancel()
    assert controller.sync.metrics == {}


async def test_a_check_goes_on_without_generators_that_have_just_died(tmp_path, tiny_model):
    config = simulated(tmp_path, tiny_model, ahead=0, pull=0.0)
    check = WeightSyncConfig(check=True)
    config = replace(config, trainer=replace(config.trainer, weight_sync=check))

    async def measure(episodes):
        return {"mismatch/all/max": 1e-5 * len(episodes)}

    async def nobody(*_):
        return []

    controller = Controller(config)
    controller.sync._measure = measure
    async with asyncio.timeout(60), controller:
        generators = controller.actors.generators
        answering, generators.sample_on_each = generators.sample_on_each, nobody
        assert "sync/mismatch" not in await controller.step(0)
        generators.sample_on_each = answering
        row = await controller.step(1)
        assert row["sync/mismatch"] == 1e-5 * config.generator.replicas
