"""What `torchtitan-rl plan` predicts for this machine's CPU against what is measured here, as JSON
lines: memory of trainer and generator by torch's own profile of allocations, operations of a step
by torch's FlopCounterMode, for the tiny model and SmolLM2-135M (`make model` makes it).

    python benchmarks/plan.py            from the repository's root

The real trainer takes two steps on episodes of random lengths; the first gives the optimizer its
states. The real engine loads weights and samples a step's completions. What a process holds besides
tensors, mostly what it imports, is a line of its own.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common import note, report

from torchtitan_rl.config import RunConfig
from torchtitan_rl.config.models import SMOLLM2_FOLDER
from torchtitan_rl.core.types import Episode
from torchtitan_rl.models.makers.tiny import write_tiny_model
from torchtitan_rl.platform import worker_env
from torchtitan_rl.recipes import registry
from torchtitan_rl.run.traced import Lengths, trace_generator, trace_trainer
from torchtitan_rl.supervision.spawn import end_all_processes, per_rank, spawn_trainer

CASES = {
    "tiny": ("grpo_sum_digits_tiny", Lengths(36, 24)),
    "SmolLM2-135M": ("grpo_sum_digits_smollm2_135m", Lengths(40, 28)),
}
"""Recipe, and tokens of prompt and completion, by name."""


def episodes_of(config: RunConfig, lengths: Lengths) -> list[Episode]:
    """A step's episodes; completions differ in length by up to a quarter."""
    rng = random.Random(0)
    made = []
    for prompt in range(config.prompts_per_step):
        ids = [rng.randrange(1, 250) for _ in range(lengths.prompt)]
        for _ in range(config.samples_per_prompt):
            new = lengths.completion + rng.randint(-1, 1) * (lengths.completion // 4)
            made.append(
                Episode(
                    policy_version=0,
                    prompt_token_ids=ids,
                    token_ids=[rng.randrange(1, 250) for _ in range(new)],
                    reward=1.0,
                    advantage=rng.gauss(0, 1),
                    task="plan",
                    group_id=f"plan/{prompt}",
                    token_versions=[0] * new,
                )
            )
    return made


async def measure_trainer(
    config: RunConfig, folder: str, lengths: Lengths, *, profiling: bool
) -> dict[str, int]:
    """What the real trainer takes in a step after the first."""
    episodes = episodes_of(config, lengths)
    settings = replace(
        config.trainer,
        backend="profiled:ProfiledTrainer",
        kwargs={"profiling": float(profiling)},
    )
    with tempfile.TemporaryDirectory() as temporary:
        trainer = await spawn_trainer(
            settings, model=folder, steps=10, checkpoint_folder=f"{temporary}/checkpoints"
        )
        await trainer.train(episodes)
        await trainer.actor.begin.call()
        await trainer.train(episodes)
        await trainer.actor.count.call()
        if profiling:
            await trainer.train(episodes)
        found = per_rank(await trainer.actor.found.call())[0]
        await trainer.stop()
    return found


def measure_engine(
    config: RunConfig, folder: str, lengths: Lengths, *, profiling: bool
) -> dict[str, int]:
    """What the real engine takes when it samples a step's completions."""
    task = {
        "model": folder,
        "profiling": profiling,
        "engine": asdict(config.generator.engine),
        "prompts": config.prompts_per_step,
        "n": config.samples_per_prompt,
        "prompt": lengths.prompt,
        "max_tokens": lengths.completion,
    }
    env = os.environ | worker_env(config.generator.threads, role="generator")
    command = [sys.executable, str(Path(__file__).with_name("profiled.py")), json.dumps(task)]
    run = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    [line] = [line for line in run.stdout.splitlines() if line.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND "))


def compare(case: str, name: str, predicted: float, measured: float) -> None:
    report("plan", f"{name}_predicted", case, round(predicted, 4))
    report("plan", f"{name}_measured", case, round(measured, 4))
    report("plan", f"{name}_error", case, round(predicted / measured - 1, 4))


def run_case(case: str, recipe: str, lengths: Lengths, folder: str) -> None:
    config: Any = replace(
        registry.build_recipe(recipe, registry.built_in_recipes()), model=folder, warm_start=None
    )
    mb = 1e6
    predicted = trace_trainer(config, folder, lengths, device="cpu")
    found = asyncio.run(measure_trainer(config, folder, lengths, profiling=True))
    plain = asyncio.run(measure_trainer(config, folder, lengths, profiling=False))
    compare(case, "trainer_mb", sum(predicted.peak.values()) / mb, found["peak"] / mb)
    compare(case, "step_gflop", predicted.flops / 1e9, found["flops"] / 1e9)
    besides = plain["resident"] - found["peak"]
    report("plan", "trainer_besides_mb", case, round(besides / mb, 1))
    report("plan", "trainer_imports_mb", case, round(plain["imported"] / mb, 1))
    generator = trace_generator(config, folder, lengths, device="cpu")
    kv = int(config.generator.engine.kv_cache_gib * 2**30)
    whole = generator.weights + generator.head + generator.activations + kv
    found = measure_engine(config, folder, lengths, profiling=True)
    plain = measure_engine(config, folder, lengths, profiling=False)
    compare(case, "generator_mb", whole / mb, (found["peak"] + found["packed"]) / mb)
    besides = plain["resident"] - found["peak"] - found["packed"]
    report("plan", "generator_besides_mb", case, round(besides / mb, 1))
    report("plan", "generator_imports_mb", case, round(plain["imported"] / mb, 1))
    note(f"{case}: trainer {dict(predicted.peak)}; generator {generator.activations}, {found}")


def main(words: list[str]) -> int:
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    try:
        for case, (recipe, lengths) in CASES.items():
            if words and case not in words:
                continue
            with tempfile.TemporaryDirectory() as temporary:
                folder = SMOLLM2_FOLDER
                if case == "tiny":
                    folder = str(write_tiny_model(Path(temporary) / "tiny", seed=0))
                run_case(case, recipe, lengths, folder)
    finally:
        end_all_processes()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
