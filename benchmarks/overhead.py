"""What the actors cost: generate through the actor against the bare engine on the same requests,
and the share of a synchronous step that is not generate, grade, train or sync.

Both sides of `actor_vs_engine` take turns in one process, on one engine, so that the machine's mood
hits both alike; the ratio is that of the medians.
"""

import asyncio
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from bare_engine import BareGenerator
from common import note, report, tiny_recipe

from torchtitan_rl.config import CheckpointConfig, EvaluationConfig, SamplingConfig
from torchtitan_rl.models.makers.tiny import write_tiny_model
from torchtitan_rl.observability.sinks import read_metrics
from torchtitan_rl.platform import worker_env
from torchtitan_rl.run.launch import train
from torchtitan_rl.supervision.spawn import end_all_processes, spawn

ROUNDS = 15
PROMPTS, SAMPLES, NEW_TOKENS = 32, 8, 24
STEPS = 20


async def actor_vs_engine(model: Path) -> float:
    config = tiny_recipe().generator
    sampling = SamplingConfig(n=SAMPLES, max_tokens=NEW_TOKENS)
    generator = await spawn(
        BareGenerator,
        config,
        model=str(model),
        seed=0,
        env=worker_env(config.threads, role="generator"),
    )
    await generator.actor.setup.call_one()
    prompts = [[(7 * i + k) % 250 for k in range(36)] for i in range(PROMPTS)]
    through_actor, bare = [], []
    for round_number in range(ROUNDS + 1):
        started = time.perf_counter()
        completions = await generator.actor.generate.call_one(prompts, sampling_config=sampling)
        seconds = time.perf_counter() - started
        rates = (
            sum(len(c.token_ids) for c in completions) / seconds,
            await generator.actor.bare.call_one(prompts, sampling),
        )
        if round_number:  # the first one warms up
            through_actor.append(rates[0])
            bare.append(rates[1])
        note(f"round {round_number}: actor {rates[0]:.0f} tok/s, bare engine {rates[1]:.0f} tok/s")
    await generator.stop()
    return statistics.median(through_actor) / statistics.median(bare)


async def orchestration_share(folder: Path) -> float:
    config = replace(
        tiny_recipe(),
        steps=STEPS,
        output_dir=str(folder),
        run_name="run",
        evaluation=EvaluationConfig(every=STEPS, prompts=32),
        checkpoint=CheckpointConfig(every=10),
    )
    await train(config)
    rows = [r for r in read_metrics(folder / "run" / "metrics.jsonl") if "time/step" in r][2:]
    phases = ("generate", "grade", "train", "sync")
    working = sum(row[f"time/{phase}"] for row in rows for phase in phases)
    return 1 - working / sum(row["time/step"] for row in rows)


async def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = write_tiny_model(folder / "tiny", seed=0)
        report("overhead", "actor_vs_engine", "tiny", await actor_vs_engine(model))
        report("overhead", "orchestration_share", "tiny", await orchestration_share(folder))


if __name__ == "__main__":
    try:
        asyncio.run(main())
    finally:
        end_all_processes()
