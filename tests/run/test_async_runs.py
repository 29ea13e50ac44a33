"""Runs whose rollouts are ahead of training, with generators that die and rewards that fail."""

import asyncio
import json
import random
import re
from dataclasses import replace

import psutil
import pytest

from tests.low_tokens import Moody
from tests.support import low_tokens, small_engine
from torchtitan_rl.config import (
    GeneratorConfig,
    RolloutConfig,
    SamplingConfig,
    SupervisionConfig,
    TrainerConfig,
)
from torchtitan_rl.observability.json_lines import read_lines
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.supervision.calls import WorkerDiedError


def config_for(folder, tiny_model, *, simulated=False, **changes):
    base = low_tokens()
    if simulated:  # where neither what is sampled nor what is learned matters
        generator = GeneratorConfig(
            backend="simulated",
            sampling=changes.pop("sampling", base.generator.sampling),
            engine=small_engine(),
        )
        trainer = TrainerConfig(backend="simulated", threads=1)
        base = replace(base, generator=generator, trainer=trainer)
    return replace(
        replace(
            base,
            model=str(tiny_model),
            prompts_per_step=4,
            evaluation=replace(base.evaluation, every=100),
            output_dir=str(folder),
            run_name="run",
        ),
        **changes,
    )


async def steps(config, count, meanwhile=None):
    async with Controller(config) as controller:
        disturbing = asyncio.ensure_future(meanwhile(controller)) if meanwhile else None
        rows = [await controller.step(step) for step in range(count)]
        if disturbing:
            disturbing.cancel()
        controller.rollout_log.close()
    return rows, controller


def saved(folder):
    """All rollouts of the run; each is there once."""
    records = [r for file in folder.glob("run/rollouts/*") for _, r in read_lines(file)]
    assert len({(r["group"], r["sample"]) for r in records}) == len(records)
    return records


@pytest.mark.timeout(240)
async def test_generation_runs_ahead_and_survives_its_generators(tmp_path, tiny_model):
    """Two generators, one killed at a random moment: every step trains all its groups, on tokens
    that are at most one version old, and the logprobs still agree. When the trainer dies in the
    end, the run ends, and the generators with it."""
    long = SamplingConfig(n=4, max_tokens=60)
    base = low_tokens()
    config = config_for(
        tmp_path,
        tiny_model,
        steps=8,
        max_offpolicy_steps=1,
        generator=replace(base.generator, replicas=2, sampling=long),
    )
    rng = random.Random(0)

    async def kill(controller):
        generators = controller.actors.generators
        await asyncio.sleep(rng.uniform(0.2, 1.0))
        for process in generators.pool.replicas[rng.randrange(2)].spawned.processes:
            process.kill()

    async with Controller(config) as controller:
        killing = asyncio.ensure_future(kill(controller))
        rows = [await controller.step(step) for step in range(6)]
        await killing
        trainer = controller.actors.trainer
        generators = [replica.spawned for replica in controller.actors.generators.pool.alive]
        assert generators
        for process in trainer.processes:
            process.kill()
        with pytest.raises(WorkerDiedError, match="while waiting for the trainer"):
            await controller.step(6)
        controller.rollout_log.close()
    processes = [process for actor in (trainer, *generators) for process in actor.processes]
    assert not psutil.wait_procs(processes, timeout=1)[1]
    assert [row["policy_version"] for row in rows] == list(range(1, 7))
    assert all(row["episodes"] == 16 for row in rows)
    assert all(row["mismatch/all/max"] <= 1e-4 for row in rows if row["policy_age/all/max"] == 0)
    assert max(row["policy_age/all/max"] for row in rows) == 1
    deaths = controller.actors.generators.pool.deaths.total
    assert sum(row["generators/died"] for row in rows) == deaths
    assert deaths >= 1
    assert all(row["groups/failed/all"] == 0 for row in rows)
    # Nothing has failed; what was under way when the trainer died was cancelled.
    failures = tmp_path / "run" / "logs" / "failures.jsonl"
    records = failures.read_text().splitlines() if failures.exists() else []
    assert {json.loads(record)["kind"] for record in records} <= {"cancelled"}


@pytest.mark.parametrize("ahead", [0, 1])
async def test_reward_functions_that_fail_cost_their_group(tmp_path, tiny_model, ahead, capsys):
    config = config_for(
        tmp_path,
        tiny_model,
        simulated=True,
        task=Moody.Config(),
        steps=3,
        max_offpolicy_steps=ahead,
    )
    rows, _ = await steps(config, 3)
    assert sum(row["groups/failed/moody"] for row in rows) >= 2
    said = capsys.readouterr().out
    assert said.count("failed: reward function of task 'moody'") == 1  # not every step again
    assert sum(row["rollouts/failed/all"] for row in rows) >= 8
    # Where groups run ahead another one takes the place; else the step goes on without.
    assert all(row["episodes"] == (16 if ahead else 12) for row in rows)
    logged = [
        json.loads(line)
        for line in (tmp_path / "run" / "logs" / "failures.jsonl").read_text().splitlines()
    ]
    assert {record["task"] for record in logged} == {"moody"}
    assert all("raised KeyError" in record["reason"] for record in logged)
    assert len({record["group"] for record in logged}) == len(logged)
    trained = {record["group"] for record in saved(tmp_path) if record["split"] == "train"}
    spares = {name for name in trained if re.fullmatch(r"moody/train/spare-\d-\d", name)}
    assert bool(spares) == bool(ahead)
    assert {name for name in trained - spares if len(name) > len("moody/train/99")} == set()
    discarded = [record for record in saved(tmp_path) if record["split"] == "discarded"]
    assert len(discarded) == sum(row["rollouts/failed/all"] for row in rows)
    assert all("raised KeyError" in record["failure"] for record in discarded)
    assert all(record["reward"] is None and record["sequences"] for record in discarded)


async def test_a_reward_function_that_always_fails_ends_the_run(tmp_path, tiny_model):
    broken = Moody.Config(always=True)
    config = config_for(tmp_path, tiny_model, simulated=True, task=broken, steps=3)
    with pytest.raises(Exception, match=r"reward function of task 'moody'.*raised KeyError"):
        await steps(config, 1)


async def test_a_run_whose_episodes_are_all_too_long_stops_and_says_so(tmp_path, tiny_model):
    supervision = SupervisionConfig(most_untrainable_steps=2)
    config = config_for(tmp_path, tiny_model, simulated=True, supervision=supervision)
    tight = replace(config.trainer, tokens_per_microbatch=4, overlong="drop")
    async with Controller(replace(config, trainer=tight)) as controller:
        row = await controller.step(0)
        assert row["overlong/dropped"] > 0
        assert row["episodes"] == 0
        with pytest.raises(RuntimeError, match=r"2 steps in a row had nothing.*episode too long"):
            await controller.step(1)


async def test_dynamic_sampling_keeps_what_teaches(tmp_path, tiny_model):
    """Samples of one token: many groups have equal rewards, and others take their place."""
    config = config_for(
        tmp_path,
        tiny_model,
        simulated=True,
        sampling=SamplingConfig(n=2, max_tokens=1),
        steps=2,
        rollout=RolloutConfig(max_groups_per_step=64),
    )
    rows, _ = await steps(config, 2)
    assert all(row["episodes"] == 8 for row in rows)
    not_useful = [r for r in saved(tmp_path) if r["split"] == "discarded"]
    assert {r["failure"] for r in not_useful} == {"not useful"}
    assert len(not_useful) == sum(row.get("rollouts/not_useful/all", 0) for row in rows) > 0
    assert all(r["reward"] is not None and r["status"] != "failed" for r in not_useful)
