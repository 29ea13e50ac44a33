"""Generators that are killed in the middle of a real run: how soon it goes on, and what it lost.

SIGKILL, five times, at random moments, with one generator (the run waits for its successor) and
with two (the other one takes over).
"""

import asyncio
import random
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from async_overlap import Coins
from common import note, report, tiny_recipe

from torchtitan_rl.config import CheckpointConfig, EvaluationConfig
from torchtitan_rl.models.makers.tiny import write_tiny_model
from torchtitan_rl.observability.json_lines import read_lines
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.supervision.spawn import end_all_processes

KILLS = 5
MOST_STEPS = 500
RECOVERY_SECONDS = 120


async def kill_at_random(controller: Controller, recoveries: list[float]) -> None:
    """Each time until the successor of the dead one has the weights and takes work."""
    rng = random.Random(0)
    replicas = controller.actors.generators.pool.replicas
    for _ in range(KILLS):
        await asyncio.sleep(rng.uniform(0.5, 4.0))
        victim = rng.choice(replicas)
        dead = victim.spawned
        assert dead is not None
        started = time.perf_counter()
        for process in dead.processes:
            process.kill()
        async with asyncio.timeout(RECOVERY_SECONDS):
            while victim.spawned in (dead, None):
                await asyncio.sleep(0.02)
        recoveries.append(time.perf_counter() - started)
        note(f"generator {victim.number} was killed; back after {recoveries[-1]:.1f} s")


async def survive(folder: Path, *, replicas: int, ahead: int) -> None:
    recipe = tiny_recipe()
    config = replace(
        recipe,
        model=str(folder / "model"),
        warm_start=None,
        task=Coins.Config(),
        steps=MOST_STEPS,
        max_offpolicy_steps=ahead,
        generator=replace(recipe.generator, replicas=replicas, threads=1),
        trainer=replace(recipe.trainer, threads=1),
        evaluation=EvaluationConfig(every=1000, prompts=1),
        checkpoint=CheckpointConfig(every=1000),
        output_dir=str(folder),
        run_name=f"{replicas}-{ahead}",
    )
    recoveries: list[float] = []
    rows = []
    async with Controller(config) as controller:
        killing = asyncio.ensure_future(kill_at_random(controller, recoveries))
        while not killing.done() or len(rows) < 10:
            rows.append(await controller.step(len(rows)))
        await killing
        controller.rollout_log.close()
    case = f"{replicas} generators, {ahead} ahead"
    samples = Counter(
        (line["group"], line["sample"])
        for file in (folder / config.run_name / "rollouts").glob("step-*.jsonl")
        for _, line in read_lines(file)
        if line["split"] == "train"
    )
    expected = len(rows) * config.prompts_per_step * config.generator.sampling.n
    for metric, value in {
        "steps": len(rows),
        "deaths": controller.actors.generators.pool.deaths.total,
        "worst_recovery_s": max(recoveries),
        "samples_lost": expected - len(samples),
        "samples_twice": samples.total() - len(samples),
        # Of tokens by the trainer's own weights: others differ because the weights do.
        **({} if ahead else {"mismatch_max": max(row["mismatch/all/max"] for row in rows)}),
    }.items():
        report("survival", metric, case, value)


async def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_tiny_model(folder / "model", seed=0)
        await survive(folder, replicas=1, ahead=0)
        await survive(folder, replicas=2, ahead=0)
        await survive(folder, replicas=2, ahead=1)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    finally:
        end_all_processes()
