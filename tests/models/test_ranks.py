"""Models on real gloo ranks: they compute what one rank does; what they publish is, put together,
the model to the byte;
weights and optimizer states come back from host memory as they were; router replay, and the
gradient of several microbatches, are those of one rank."""

import os
import pickle
import subprocess
import sys

import pytest
import torch

from tests.models.architectures import write_tiny
from tests.models.rank_checks import ACCUMULATED, PUBLISHED, REPLAYED, Found, Task
from tests.models.support import forward, titan_model
from torchtitan_rl.models.router_replay import replay_routing
from torchtitan_rl.platform import worker_env


@pytest.fixture(scope="module")
def task(tiny_model, moe_model, tmp_path_factory):
    """Three rows of 47 tokens, so that no degree divides them, and any routing for two layers."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 265, (3, 47), generator=generator)
    routing = torch.rand(tokens.numel(), 2, 8, generator=generator).argsort(-1)[..., :2]
    lengths = (47, 20, 33, 1, 8, 13, 21, 34, 1, 5, 17, 3)  # a cell of padding is one token
    microbatches = [torch.randint(0, 265, (1, n), generator=generator) for n in lengths]
    folders = {"tiny": str(tiny_model), "moe": str(moe_model)}
    for name in ("qwen2", "llama3", "smollm3"):
        folders[name] = str(write_tiny(name, tmp_path_factory.mktemp("archs") / name))
    return Task(folders, tokens, routing, microbatches)


@pytest.fixture(scope="module")
def found(task, tmp_path_factory) -> Found:
    """What rank 0 has seen in groups of four, two and one."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "task.pickle").write_bytes(pickle.dumps(task))
    env = {**os.environ, **worker_env(1, role="trainer"), "PYTHONPATH": os.getcwd()}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.models.rank_checks", str(folder)],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        said = [rank.communicate(timeout=200)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, errors in zip(ranks, said, strict=True):
        assert rank.returncode == 0, errors[-3000:]
    return pickle.loads((folder / "found.pickle").read_bytes())


def test_ranks_publish_the_model_between_them(found, task):
    """Every case has published; the ranks themselves have checked that it is the model."""
    cases = {(name, d) for name, groups in PUBLISHED.items() for ds in groups.values() for d in ds}
    assert found.shares.keys() == cases
    for (name, degrees), share in found.shares.items():
        _, shard, tensor_parallel, _ = degrees
        # No rank has more than its part, but for the small tensors that all ranks have.
        assert share < 1.05 / (shard * tensor_parallel), (name, degrees)


@pytest.mark.parametrize("how", REPLAYED)
def test_replay_on_two_ranks_is_replay_on_one(moe_model, task, found, how):
    model = titan_model(moe_model)
    with replay_routing(model, task.routing):
        logits = forward(model, task.tokens)
        logits.log_softmax(-1)[..., 7].sum().backward()
    chosen, sharded_logits, gradients = found.replays[how]
    assert len(chosen) == 4  # two layers, and once more in the recomputation
    for experts, layer in zip(chosen, (0, 1, 1, 0), strict=True):
        assert torch.equal(experts, task.routing[:, layer])
    torch.testing.assert_close(sharded_logits, logits, rtol=0, atol=1e-5)
    # Ranks with the same rows add up to twice the gradient.
    copies = REPLAYED[how][1]
    for name, parameter in model.named_parameters():
        difference = gradients[name] / copies - parameter.grad
        assert difference.norm() <= 1e-5 * parameter.grad.norm(), name
        assert "gate" not in name or parameter.grad.abs().sum() > 0


@pytest.fixture(scope="module")
def whole_gradient(moe_model, task):
    """The gradient of all microbatches, on one rank."""
    model = titan_model(moe_model)
    for tokens in task.microbatches:
        forward(model, tokens).log_softmax(-1)[..., 7].sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("sync", ["every_microbatch", "last_microbatch"])
@pytest.mark.parametrize("how", ACCUMULATED)
def test_the_gradient_of_several_microbatches_is_that_of_one_rank(found, whole_gradient, how, sync):
    """Copies of the model (HSDP) and experts on several ranks, with activation checkpointing."""
    accumulated = found.accumulated[how, sync]
    assert accumulated.gradients.keys() == whole_gradient.keys()
    for name, gradient in whole_gradient.items():
        difference = accumulated.gradients[name] - gradient
        assert difference.norm() <= 1e-5 * gradient.norm(), name
    flat = torch.cat([gradient.flatten() for gradient in whole_gradient.values()])
    assert accumulated.norm == pytest.approx(flat.double().norm().item(), rel=1e-5)


@pytest.mark.parametrize("how", ACCUMULATED)
def test_gradients_travel_as_often_as_they_are_to(found, task, how):
    """Copies of the model add theirs up once, whatever `gradient_sync` says."""
    (replicas, *_), _ = ACCUMULATED[how]
    every, last = (
        found.accumulated[how, sync].collectives for sync in ("every_microbatch", "last_microbatch")
    )
    microbatches = len(task.microbatches) // 4
    scattered = [sum(n for k, n in c.items() if "reduce_scatter" in k) for c in (every, last)]
    reduced = [sum(n for k, n in c.items() if "reduce" in k) for c in (every, last)]
    assert scattered[0] == microbatches * scattered[1] > 0
    copies = [all_of - own for all_of, own in zip(reduced, scattered, strict=True)]
    assert copies[0] == copies[1]
    # Experts of which one rank of a copy has the whole are not scattered.
    assert copies[0] >= scattered[1] if replicas > 1 else copies[0] == 0
