"""This library's side of peer_trl.py: a real Controller with real actors. Prints one JSON object.

A second argument overrides settings, to try others:
    python benchmarks/peer_ours.py work.json '{"replicas": 1, "generator_threads": 2}'
"""

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from common import note
from peer_work import Work, reward

from torchtitan_rl.actors.generator import VLLMGenerator
from torchtitan_rl.actors.trainer import Trainer
from torchtitan_rl.config import (
    AdvantageConfig,
    CheckpointConfig,
    EngineConfig,
    EvaluationConfig,
    LogConfig,
    OptimizerConfig,
    RolloutConfig,
    SamplingConfig,
)
from torchtitan_rl.rollout.renderer import ChatRenderer
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.supervision.spawn import end_all_processes
from torchtitan_rl.tasks.task import Example, Task

PHASES = ("generate", "grade", "train", "sync")


class Sums(Task):
    """The prompts of the work, and its reward."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        name: str = "sums"
        work: Work

    config: Config

    def train_example(self, index):
        return Example(self.config.work.messages(index), None)

    def heldout_examples(self, count):
        return [self.train_example(-1 - index) for index in range(count)]

    def reward(self, completions, expected_answer):
        return [reward(c.text) for c in completions]


def recipe(
    work: Work,
    folder: str,
    *,
    replicas: int = 1,
    generator_threads: int = 0,
    trainer_threads: int = 0,
    share_prompts: bool = True,
    tokens_per_microbatch: int = 640,
) -> Controller.Config:
    """0 threads are all cores. peer_trl.OURS has what differs by model."""
    return Controller.Config(
        # The work: as theirs.
        model=work.model,
        task=Sums.Config(work=work),
        steps=work.all_steps,
        prompts_per_step=work.prompts,
        advantage=AdvantageConfig(name="grpo"),
        rollout=RolloutConfig(thinking=True),  # a prompt as the model's own template makes it
        # How fast.
        generator=VLLMGenerator.Config(
            replicas=replicas,
            sampling=SamplingConfig(n=work.samples, max_tokens=work.new_tokens),
            engine=EngineConfig(max_model_len=128, kv_cache_gib=0.25),
            threads=generator_threads,
        ),
        trainer=Trainer.Config(
            optimizer=OptimizerConfig(lr=work.lr),
            share_prompts=share_prompts,
            tokens_per_microbatch=tokens_per_microbatch,
            threads=trainer_threads,
        ),
        # Nothing besides.
        evaluation=EvaluationConfig(every=1000, prompts=1),
        checkpoint=CheckpointConfig(every=1000),
        log=LogConfig(rollouts=False),
        output_dir=folder,
        run_name="run",
    )


async def main(work: Work, changes: dict[str, Any]) -> dict[str, Any]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        async with Controller(recipe(work, folder, **changes)) as controller:
            for step in range(work.all_steps):
                started = time.perf_counter()
                values = await controller.step(step)
                rows.append({**values, "seconds": time.perf_counter() - started})
                note(f"step {step}: {rows[-1]['seconds']:.2f} s")
                if values["episodes"] != work.prompts * work.samples:
                    raise RuntimeError(f"{values['episodes']} episodes were trained")
    renderer = ChatRenderer(work.model, thinking=True)
    return {
        "seconds": [row["seconds"] for row in rows],
        "new_tokens": [round(row["tokens_per_second"] * row["time/step"]) for row in rows],
        "prompts": [renderer.prompt(work.messages(i)) for i in range(work.prompts * len(rows))],
        "phases": {phase: [row[f"time/{phase}"] for row in rows] for phase in PHASES},
    }


if __name__ == "__main__":
    arguments = [Work.load(sys.argv[1]), json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}]
    try:
        print(json.dumps(asyncio.run(main(*arguments))))
    finally:
        end_all_processes()
