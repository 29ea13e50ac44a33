"""Snapshots beside training: the next step starts at once, and its optimizer waits for the copy."""

import asyncio

import pytest
import torch

from tests.actors.slow_trainer import SECONDS
from tests.support import episode
from torchtitan_rl.batching.grid import make_grid
from torchtitan_rl.config import OptimizerConfig, Parallelism, TrainerConfig
from torchtitan_rl.core.metrics import flatten, merge_metrics
from torchtitan_rl.supervision.spawn import per_rank, spawn_trainer
from torchtitan_rl.weight_sync.handle import merge_handles
from torchtitan_rl.weight_sync.reading import open_snapshot

GRID = make_grid([episode(advantage=a) for a in (1.0, 2.0)], dp_degree=2, tokens_per_microbatch=64)


@pytest.fixture(scope="module")
async def trainer(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("slow")
    config = TrainerConfig(
        backend="tests.actors.slow_trainer:SlowTrainer",
        optimizer=OptimizerConfig(lr=1e-2),
        parallelism=Parallelism(data_parallel_shard_degree=2),
        threads=1,
    )
    spawned = await spawn_trainer(
        config, model=str(tiny_model), steps=9, checkpoint_folder=str(folder)
    )
    yield spawned.actor
    await spawned.stop()


async def publish(trainer, **options):
    handle = merge_handles(per_rank(await trainer.publish_weights.call(**options)))
    with open_snapshot(handle) as snapshot:
        return handle, {name: tensor.clone() for name, tensor in snapshot.tensors()}


async def train(trainer):
    return flatten(merge_metrics(per_rank(await trainer.train_step.call(GRID))))


async def test_a_step_begins_beside_the_snapshot_and_does_not_get_into_it(trainer):
    first, before = await publish(trainer)
    (second, beside), metrics = await asyncio.gather(publish(trainer), train(trainer))
    # It had little else to do than to wait; without the wait the snapshot would be of the new
    # weights, which it is not.
    assert metrics["sync/blocked_seconds"] > SECONDS / 2
    assert second.version == first.version
    assert all(torch.equal(beside[name], before[name]) for name in before)
    third, after = await publish(trainer)
    assert third.version == first.version + 1
    assert not any(torch.equal(after[name], before[name]) for name in before)
    assert (await train(trainer))["sync/blocked_seconds"] < SECONDS / 2


async def test_two_snapshots_at_once_are_taken_one_after_the_other(trainer):
    (one, first), (two, second) = await asyncio.gather(publish(trainer), publish(trainer))
    assert one.version == two.version
    assert all(torch.equal(first[name], second[name]) for name in first)


async def test_a_snapshot_that_fails_does_not_keep_the_optimizer_waiting(trainer):
    failing = publish(trainer, dtype="no dtype")
    failed, metrics = await asyncio.gather(failing, train(trainer), return_exceptions=True)
    assert isinstance(failed, Exception)
    assert metrics["sync/blocked_seconds"] >= 0
    await publish(trainer)
