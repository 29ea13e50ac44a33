"""Recipes for runs on several hosts, which take seconds."""

import os
from dataclasses import replace

from tests.support import low_tokens
from torchtitan_rl.config import (
    CheckpointConfig,
    ClusterConfig,
    EvaluationConfig,
    GeneratorConfig,
    LogConfig,
    LossConfig,
    RunConfig,
    SamplingConfig,
)

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


def undisturbed() -> RunConfig:
    """The same run on one host."""
    return replace(faults(), cluster=ClusterConfig())
