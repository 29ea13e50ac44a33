"""Actors without a model: they do what is declared, in the places of the real ones."""

import asyncio
import math
from dataclasses import replace

import pytest

from tests.support import low_tokens
from torchtitan_rl.config import (
    AdvantageConfig,
    EngineConfig,
    GeneratorConfig,
    KLConfig,
    LossConfig,
    SamplingConfig,
    TrainerConfig,
)
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.supervision.calls import WorkerDiedError, call_with_deadline
from torchtitan_rl.supervision.spawn import spawn_generator


def config_for(folder, tiny_model, **changes):
    generator = GeneratorConfig(
        backend="simulated",
        sampling=SamplingConfig(n=4, max_tokens=8),
        engine=EngineConfig(max_model_len=128),
        threads=1,
    )
    config = replace(
        low_tokens(),
        model=str(tiny_model),
        generator=replace(generator, **changes.pop("generator", {})),
        trainer=TrainerConfig(backend="simulated", threads=1),
        evaluation=replace(low_tokens().evaluation, every=100),
        steps=20,
        output_dir=str(folder),
        run_name="run",
    )
    return replace(config, **changes)


async def run(config, steps):
    async def no_evaluation() -> dict[str, float]:
        return {}

    async with Controller(config) as controller:
        controller.evaluate = no_evaluation  # type: ignore[method-assign]  # it may fail, too
        return [await controller.step(step) for step in range(steps)]


@pytest.mark.parametrize(
    ("config", "kwargs", "message"),
    [
        (
            GeneratorConfig,
            {"failure_rate": 1.5},
            "kwargs.failure_rate .* 0 to 1; got 1.5",
        ),
        (GeneratorConfig, {"death_rate": -0.1}, "generator.kwargs.death_rate .* got -0.1"),
        (GeneratorConfig, {"seconds_per_token": -1.0}, "seconds_per_token must be a number from 0"),
        (GeneratorConfig, {"seconds_per_pull": math.nan}, "generator.kwargs.seconds_per_pull must"),
        (GeneratorConfig, {"seconds": 1.0}, "it has no 'seconds'; it takes seconds_per_token"),
        (TrainerConfig, {"seconds_per_step": -1.0}, "trainer.kwargs.seconds_per_step must be a"),
        (
            TrainerConfig,
            {"seconds_per_publish": math.inf},
            "kwargs.seconds_per_publish must",
        ),
    ],
)
def test_what_cannot_be_is_refused(config, kwargs, message):
    with pytest.raises(ValueError, match=message):
        config(backend="simulated", kwargs=kwargs)


def no_signal(group):
    return [0.0] * len(group)


async def test_declared_failures_cost_groups_and_never_the_run(tmp_path, tiny_model):
    """A KL term is on, so that groups train although their advantages are all 0."""
    ahead = 2
    config = config_for(
        tmp_path,
        tiny_model,
        generator={"kwargs": {"seconds_per_token": 0.001, "failure_rate": 0.2}},
        max_offpolicy_steps=ahead,
        advantage=AdvantageConfig(name=f"{__name__}:no_signal"),
    )
    loss = LossConfig(rollout_kl=KLConfig(coef=0.1))
    config = replace(config, trainer=replace(config.trainer, loss=loss))
    rows = await run(config, 5)
    assert all(row["episodes"] == 32 for row in rows)
    assert 1 <= max(row["policy_age/all/max"] for row in rows) <= ahead
    assert sum(row["rollouts/failed/all"] for row in rows) > 0


async def test_a_generator_repeats_itself_and_dies_when_it_is_told_to(tiny_model):
    config = GeneratorConfig(backend="simulated", sampling=SamplingConfig(n=2, max_tokens=8))
    prompts, names = [[1, 2], [3]], ["a", "b"]
    spawned, doomed = await asyncio.gather(
        spawn_generator(config, model=tiny_model, seed=0),
        spawn_generator(replace(config, kwargs={"death_rate": 1.0}), model=tiny_model, seed=0),
    )
    made = [await spawned.actor.generate.call_one(prompts, group_ids=names) for _ in range(2)]
    await spawned.stop()
    assert made[0] == made[1]
    assert [c.prompt_idx for c in made[0]] == [0, 0, 1, 1]
    call = doomed.actor.generate.call_one(prompts)
    with pytest.raises(WorkerDiedError):
        await call_with_deadline("the generator", call, deadline_seconds=60)
    await doomed.stop()
