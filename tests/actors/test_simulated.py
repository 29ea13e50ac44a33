"""Actors without a model: they do what is declared, in the places of the real ones."""

from dataclasses import replace

import pytest

from tests.support import low_tokens
from torchtitan_rl.actors.engine import EngineConfig
from torchtitan_rl.actors.simulated import SimulatedGenerator, SimulatedTrainer
from torchtitan_rl.controller import Controller
from torchtitan_rl.rollout import RolloutConfig
from torchtitan_rl.sampling import SamplingConfig


def config_for(folder, tiny_model, **changes):
    generator = SimulatedGenerator.Config(
        sampling=SamplingConfig(n=4, max_tokens=8),
        engine=EngineConfig(max_model_len=128),
        threads=1,
    )
    config = replace(
        low_tokens(),
        model=str(tiny_model),
        generator=replace(generator, **changes.pop("generator", {})),
        trainer=SimulatedTrainer.Config(threads=1),
        evaluation=replace(low_tokens().evaluation, every=100),
        steps=20,
        output_dir=str(folder),
        run_name="run",
    )
    return replace(config, **changes)


async def run(config, steps):
    async with Controller(config) as controller:
        return [await controller.step(step) for step in range(steps)]


async def test_a_run_without_a_model_repeats_itself(tmp_path, tiny_model):
    def rewards(rows):
        return [(row["reward/all/mean"], row["policy_age/max"]) for row in rows]

    first = await run(config_for(tmp_path / "a", tiny_model), 3)
    again = await run(config_for(tmp_path / "b", tiny_model), 3)
    assert rewards(first) == rewards(again)
    assert all(age == 0 for _, age in rewards(first))


@pytest.mark.parametrize("ahead", [1, 3])
async def test_declared_failures_cost_groups_and_never_the_run(tmp_path, tiny_model, ahead):
    config = config_for(
        tmp_path,
        tiny_model,
        generator={"seconds_per_token": 0.001, "failure_rate": 0.2},
        max_offpolicy_steps=ahead,
    )
    rows = await run(config, 8)
    assert all(row["episodes"] == 32 for row in rows)
    assert 1 <= max(row["policy_age/max"] for row in rows) <= ahead
    assert sum(row["rollouts/failed/all"] for row in rows) > 0


async def test_declared_deaths_are_survived(tmp_path, tiny_model):
    config = config_for(
        tmp_path,
        tiny_model,
        generator={"death_rate": 0.15},
        max_offpolicy_steps=1,
        generator_replicas=2,
    )
    rows = await run(config, 6)
    assert all(row["episodes"] == 32 for row in rows)
    assert sum(row["generators/died"] for row in rows) > 0
    assert all(row["groups/dropped/all"] == 0 for row in rows)


async def test_groups_that_take_too_long_are_replaced(tmp_path, tiny_model):
    """One sequence at a time: with the others in line, groups run out of time."""
    config = config_for(
        tmp_path,
        tiny_model,
        generator={"seconds_per_token": 0.02, "engine": EngineConfig(max_num_seqs=3)},
        max_offpolicy_steps=1,
        prompts_per_step=4,
        rollout=RolloutConfig(timeout_seconds=0.8),
    )
    rows = await run(config, 3)
    assert all(row["episodes"] == 16 for row in rows)
    assert sum(row["rollouts/timed_out/all"] for row in rows) > 0
