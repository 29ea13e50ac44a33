"""Recipes for runs on several hosts, which take seconds."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.low_tokens import LowTokens
from tests.support import low_tokens
from torchtitan_rl.config import (
    CheckpointConfig,
    ClusterConfig,
    EvaluationConfig,
    GeneratorConfig,
    LogConfig,
    LossConfig,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    SupervisionConfig,
)
from torchtitan_rl.core.types import Rollout
from torchtitan_rl.tasks.task import Reward

MODEL = os.environ.get("TEST_MODEL", "model")


def two_ranks() -> RunConfig:
    """A real trainer of two ranks, and a real generator for each host of two."""
    config = low_tokens()
    parallelism = replace(config.trainer.parallelism, data_parallel_shard_degree=2)
    return replace(
        config,
        model=MODEL,
        steps=2,
        generator=replace(config.generator, replicas=2),
        trainer=replace(config.trainer, parallelism=parallelism),
        evaluation=EvaluationConfig(every=100, prompts=4),
        checkpoint=CheckpointConfig(every=100),
        log=LogConfig(samples=False),
    )


def faults() -> RunConfig:
    """A real trainer on the first of three hosts, simulated generators on the others."""
    config = two_ranks()
    parallelism = replace(config.trainer.parallelism, data_parallel_shard_degree=1)
    cluster = ClusterConfig(silence_seconds=2.0, wait_seconds=60.0)
    return replace(
        config,
        steps=25,
        # What is trained must not depend on which generator sampled it, or when.
        generator=GeneratorConfig(
            backend="simulated",
            kwargs={"seconds_per_token": 0.02},
            replicas=2,
            sampling=SamplingConfig(n=4, max_tokens=12),
            engine=config.generator.engine,
        ),
        trainer=replace(config.trainer, parallelism=parallelism, loss=LossConfig(name="reinforce")),
        checkpoint=CheckpointConfig(every=5),
        cluster=replace(cluster, roles=replace(cluster.roles, trainer=(0,), generator=(1, 2))),
    )


def trainer_gone() -> RunConfig:
    """A long run with the trainer on the first of two hosts."""
    config = faults()
    roles = replace(config.cluster.roles, generator=(1,), grader=1)
    return replace(config, steps=1000, cluster=replace(config.cluster, roles=roles))


def undisturbed() -> RunConfig:
    """The run of `faults` on one host, which nothing happens to."""
    return replace(faults(), cluster=ClusterConfig())


class PacedLowTokens(LowTokens):
    """LowTokens, with rewards as slow as a file says while a run is to last."""

    @dataclass(kw_only=True, slots=True)
    class Config(LowTokens.Config):
        pace_file: str = ""
        """File with the seconds that the rewards of a group take; none: they take no time."""

    config: Config

    def reward(
        self, completions: Sequence[Rollout], expected_answer: Any
    ) -> Sequence[Reward | float]:
        with suppress(OSError, ValueError):
            time.sleep(float(Path(self.config.pace_file).read_text()))
        return super().reward(completions, expected_answer)


def survival() -> RunConfig:
    """A real trainer on two of three hosts, and a real generator on each."""
    config = two_ranks()
    cluster = ClusterConfig(silence_seconds=4.0, wait_seconds=120.0)
    return replace(
        config,
        steps=600,
        prompts_per_step=4,
        task=PacedLowTokens.Config(pace_file=os.environ.get("TEST_PACE_FILE", "")),
        generator=replace(config.generator, replicas=3),
        # Little is learned, so that each step has something to learn.
        trainer=replace(config.trainer, optimizer=OptimizerConfig(lr=1e-5)),
        supervision=SupervisionConfig(most_untrainable_steps=1000),
        evaluation=EvaluationConfig(every=10, prompts=4),
        checkpoint=CheckpointConfig(every=5),
        cluster=replace(cluster, roles=replace(cluster.roles, trainer=(0, 1), generator=(0, 1, 2))),
    )
