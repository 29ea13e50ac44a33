"""What running ahead gains: a step's time synchronous, asynchronous, and the ideal
max(generate, train + sync); and what the controller itself costs for each episode.

First with simulated actors, whose delays are declared: nothing but scheduling is measured. Then for
real, with a model of 135M parameters: there both phases want the same cores.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from common import note, report

from torchtitan_rl.actors.generator import VLLMGenerator
from torchtitan_rl.actors.trainer import Trainer
from torchtitan_rl.config import (
    CheckpointConfig,
    EngineConfig,
    EvaluationConfig,
    GeneratorConfig,
    LogConfig,
    SamplingConfig,
    TrainerConfig,
)
from torchtitan_rl.models.makers.tiny import write_tiny_model
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.supervision.spawn import end_all_processes
from torchtitan_rl.tasks.task import Example, Task

STEPS = 20
WARM_UP = 3
"""Steps that are not counted: a stream has to fill first."""


class Coins(Task):
    """Rewards by the parity of the first token: every step trains, and grading costs nothing."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        name: str = "coins"

    config: Config

    def train_example(self, index):
        return Example([{"role": "user", "content": str(index)}], None)

    def heldout_examples(self, count):
        return [self.train_example(-1 - index) for index in range(count)]

    def reward(self, completions, expected_answer):
        return [float(c.token_ids[0] % 2) for c in completions]


def recipe(folder: Path, **changes) -> Controller.Config:
    base = Controller.Config(
        model=str(folder / "model"),
        task=Coins.Config(),
        steps=STEPS + WARM_UP + 2,  # so that the last one measured trains beside others
        prompts_per_step=16,
        generator=GeneratorConfig(
            backend="simulated",
            sampling=SamplingConfig(n=4, max_tokens=32),
            engine=EngineConfig(max_model_len=256, max_num_seqs=100_000),
            threads=1,
        ),
        trainer=TrainerConfig(backend="simulated", threads=1),
        evaluation=EvaluationConfig(every=1000, prompts=1),
        checkpoint=CheckpointConfig(every=1000),
        log=LogConfig(rollouts=False),
        output_dir=str(folder),
        run_name="run",
    )
    return replace(base, **changes)


async def run(
    config: Controller.Config, steps: int, warm_up: int = WARM_UP
) -> list[dict[str, float]]:
    """The metrics of each step after the warm-up, with its whole time."""
    rows = []
    async with Controller(config) as controller:
        for step in range(steps):
            started = time.perf_counter()
            values = await controller.step(step)
            rows.append({**values, "seconds": time.perf_counter() - started})
    return rows[warm_up:]


def mean(rows: list[dict[str, float]], *keys: str) -> float:
    return statistics.mean(sum(row[key] for key in keys) for row in rows)


async def simulated_overlap(folder: Path) -> None:
    config = recipe(folder)
    # Seats for one step's samples: those of the next wait for a free one, as in a real engine.
    engine = replace(config.generator.engine, max_num_seqs=16 * 4)
    config = replace(
        config,
        generator=replace(
            config.generator,
            engine=engine,
            kwargs={"seconds_per_token": 0.02, "seconds_per_pull": 0.02},
        ),
        trainer=replace(
            config.trainer, kwargs={"seconds_per_step": 0.5, "seconds_per_publish": 0.02}
        ),
    )
    measured = {}
    for ahead in (0, 1):
        named = replace(config, max_offpolicy_steps=ahead, run_name=f"ahead-{ahead}")
        measured[ahead] = await run(named, STEPS + WARM_UP)
        note(f"{ahead} steps ahead: {mean(measured[ahead], 'seconds'):.3f} s a step")
    sync, ahead = measured[0], measured[1]
    ideal = max(mean(sync, "time/generate"), mean(sync, "time/train", "time/sync"))
    report("async_overlap", "overlap_of_ideal", "simulated", ideal / mean(ahead, "seconds"))
    gain = mean(sync, "seconds") / mean(ahead, "seconds")
    report("async_overlap", "async_vs_sync", "simulated", gain)


MODEL_135M = {
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 30,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 64,
}
REAL_WARM_UP, REAL_STEPS = 2, 4


def real_recipe(folder: Path, *, ahead: int, threads: tuple[int, int]) -> Controller.Config:
    """Generation-heavy: few, long completions. A decoding step reads all weights for 8 tokens, so
    that it waits for memory, while training computes."""
    base = recipe(folder)
    return replace(
        base,
        model=str(folder / "model-135m"),
        prompts_per_step=2,
        steps=REAL_WARM_UP + REAL_STEPS + 2,  # so that the last one measured trains beside others
        max_offpolicy_steps=ahead,
        generator=VLLMGenerator.Config(
            sampling=SamplingConfig(n=4, max_tokens=128),
            engine=EngineConfig(max_model_len=256, kv_cache_gib=0.5),
            threads=threads[0],
        ),
        trainer=Trainer.Config(threads=threads[1]),
        run_name=f"real-{ahead}-{threads[0]}-{threads[1]}",
    )


def write_real_model(folder: Path) -> None:
    write_tiny_model(folder / "model-135m", seed=0, **MODEL_135M)


async def real_overlap(folder: Path) -> None:
    write_real_model(folder)
    cores = os.cpu_count() or 1
    half = max(1, cores // 2)
    steps = REAL_WARM_UP + REAL_STEPS
    tried = []
    for threads in ((cores, cores), (half, cores)):  # decoding may be quicker on fewer
        recipe = real_recipe(folder, ahead=0, threads=threads)
        tried.append(await run(recipe, steps, REAL_WARM_UP))
        note(f"synchronous, {threads} threads: {phases(tried[-1])}")
    sync = min(tried, key=lambda rows: mean(rows, "seconds"))
    ahead = await run(real_recipe(folder, ahead=1, threads=(half, half)), steps, REAL_WARM_UP)
    note(f"1 ahead, {(half, half)} threads: {phases(ahead)}")
    ideal = max(mean(sync, "time/generate"), mean(sync, "time/train", "time/sync"))
    case = f"135M parameters, {cores} cores"
    report("async_overlap", "async_vs_sync", case, mean(sync, "seconds") / mean(ahead, "seconds"))
    report("async_overlap", "overlap_of_ideal", case, ideal / mean(ahead, "seconds"))


def phases(rows: list[dict[str, float]]) -> str:
    keys = ["seconds", "time/generate", "time/train", "time/sync"]
    return ", ".join(f"{key} {mean(rows, key):.2f}" for key in keys)


async def controller_cost(folder: Path, episodes: int, ahead: int) -> None:
    config = recipe(
        folder,
        prompts_per_step=episodes // 8,
        max_offpolicy_steps=ahead,
        run_name=f"cost-{episodes}-{ahead}",
    )
    sampling = replace(config.generator.sampling, n=8)
    config = replace(config, generator=replace(config.generator, sampling=sampling))
    rows = await run(config, (20 if episodes < 1000 else 6) + WARM_UP)
    trained = statistics.mean(row["episodes"] for row in rows)
    seconds = statistics.median(row["seconds"] for row in rows)
    note(f"{episodes} episodes, {ahead} ahead: {seconds:.3f} s a step, {trained:.0f} trained")
    case = f"{episodes} episodes, {ahead} ahead"
    report("async_overlap", "controller_ms_per_episode", case, 1000 * seconds / episodes)


async def main(parts: list[str]) -> None:
    """`simulated`, `cost` and `real`, or those that are named."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_tiny_model(folder / "model", seed=0, weights=False)
        if not parts or "simulated" in parts:
            await simulated_overlap(folder)
        if not parts or "cost" in parts:
            for episodes in (64, 4096):
                for ahead in (0, 1):
                    await controller_cost(folder, episodes, ahead)
        if not parts or "real" in parts:
            await real_overlap(folder)


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1:]))
    finally:
        end_all_processes()
