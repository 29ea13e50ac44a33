"""Router replay on two real gloo ranks: sharded weights (FSDP2), and tensor parallelism."""

import os
import pickle
import socket
import subprocess
import sys

import pytest
import torch

from tests.models.support import forward, titan_model
from torchtitan_rl.models.router_replay import replay_routing
from torchtitan_rl.platform import worker_env

SCRIPT = """
import pickle, sys
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from tests.models.support import forward
from torchtitan_rl.models.checkpoint import load_hf
from torchtitan_rl.config.parallelism import Parallelism
from torchtitan_rl.models.parallel import build_parallel_model
from torchtitan_rl.models.router_replay import find_routers, replay_routing
from torchtitan_rl.models.spec import model_spec

folder, tokens, routing, target = sys.argv[1], *pickle.load(open(sys.argv[2], "rb")), sys.argv[3]
dist.init_process_group("gloo")
torch.autograd.set_multithreading_enabled(False)
full = lambda t: t.full_tensor() if isinstance(t, DTensor) else t

def run(**degrees):
    spec = model_spec(folder)
    model, _ = build_parallel_model(
        spec, Parallelism(**degrees), dtype="float32", activation_checkpoint="full")
    load_hf(model, spec.state_dict_adapter(spec.model, folder), folder)
    chosen = []
    for router in find_routers(model):
        router.register_forward_hook(lambda _, __, out: chosen.append(full(out[1]).flatten(0, 1)))
    with replay_routing(model, routing):
        logits = full(forward(model, tokens))
        logits.log_softmax(-1)[..., 7].sum().backward()
    gradients = {name.replace("_checkpoint_wrapped_module.", ""): full(p.grad).clone()
                 for name, p in model.named_parameters()}
    return chosen, logits.detach(), gradients

results = run(data_parallel_shard_degree=2), run(tensor_parallel_degree=2)
if dist.get_rank() == 0:
    pickle.dump(results, open(target, "wb"))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def batch():
    """Three rows of 47 tokens, so that no degree divides them, and any routing for two layers."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 265, (3, 47), generator=generator)
    return tokens, torch.rand(tokens.numel(), 2, 8, generator=generator).argsort(-1)[..., :2]


@pytest.fixture(scope="module")
def results(moe_model, batch, tmp_path_factory):
    """What rank 0 of two saw: with sharded weights, with tensor parallelism."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "batch.pickle").write_bytes(pickle.dumps(batch))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [
        *(sys.executable, "-c", SCRIPT, str(moe_model)),
        *(str(folder / "batch.pickle"), str(folder / "results.pickle")),
    ]
    env = {**os.environ, **worker_env(1, role="trainer"), "PYTHONPATH": os.getcwd()}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            command,
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=150)
            assert rank.returncode == 0, errors[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return pickle.loads((folder / "results.pickle").read_bytes())


@pytest.mark.parametrize(("case", "copies"), [(0, 2), (1, 1)], ids=["sharded", "tensor parallel"])
def test_replay_on_two_ranks_is_replay_on_one(moe_model, batch, results, case, copies):
    tokens, routing = batch
    model = titan_model(moe_model)
    with replay_routing(model, routing):
        logits = forward(model, tokens)
        logits.log_softmax(-1)[..., 7].sum().backward()
    chosen, sharded_logits, gradients = results[case]
    assert len(chosen) == 4  # two layers, and once more in the recomputation
    assert all(torch.equal(c, routing[:, i]) for c, i in zip(chosen, (0, 1, 1, 0), strict=True))
    torch.testing.assert_close(sharded_logits, logits, rtol=0, atol=1e-5)
    for name, parameter in model.named_parameters():
        # Ranks with the same rows add up to twice the gradient.
        difference = gradients[name] / copies - parameter.grad
        assert difference.norm() <= 1e-5 * parameter.grad.norm(), name
        assert "gate" not in name or parameter.grad.abs().sum() > 0
