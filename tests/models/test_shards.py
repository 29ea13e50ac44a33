"""What real gloo ranks publish of a sharded model is, put together, the model: to the byte."""

import json
import os
import socket
import subprocess
import sys

import pytest

from tests.models.support import titan_model
from torchtitan_rl.models.shards import trace_rows
from torchtitan_rl.models.spec import model_spec
from torchtitan_rl.platform import worker_env

SCRIPT = """
import json, sys
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests.models.support import forward
from torchtitan_rl.models.checkpoint import load_hf
from torchtitan_rl.config.parallelism import Parallelism
from torchtitan_rl.models.parallel import build_parallel_model
from torchtitan_rl.models.shards import LocalWeights
from torchtitan_rl.models.spec import model_spec
from torchtitan_rl.weight_sync.handle import merge_handles
from torchtitan_rl.weight_sync.reading import open_snapshot
from torchtitan_rl.weight_sync.transport import make_publisher

dist.init_process_group("gloo")
names = "data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree"
shares = {}
for folder in sys.argv[2:]:
    for degrees in json.loads(sys.argv[1]):
        spec = model_spec(folder)
        adapter = spec.state_dict_adapter(spec.model, folder)
        parallelism = Parallelism(**dict(zip(names, degrees)))
        model, _ = build_parallel_model(
            spec, parallelism, dtype="float32", activation_checkpoint="full")
        weights = LocalWeights(model, spec, adapter)
        load_hf(model, adapter, folder)
        with torch.no_grad():  # after which FSDP leaves some parameters gathered
            forward(model, torch.arange(12).view(1, 12))
        publisher = make_publisher("shm")
        expected = load_file(folder + "/model.safetensors")
        expected.pop("lm_head.weight", None)

        def assert_published(times):
            handle = publisher.publish(weights.shards(), version=0)
            handles = [None] * dist.get_world_size()
            dist.all_gather_object(handles, handle)
            if dist.get_rank() == 0:
                with open_snapshot(merge_handles(handles)) as snapshot:
                    read = dict(snapshot.tensors())
                    assert read.keys() == expected.keys(), read.keys() ^ expected.keys()
                    for name, tensor in expected.items():
                        assert torch.equal(read[name], times * tensor), (degrees, name)
            dist.barrier()
            return handles

        with torch.no_grad():
            handles, shards = assert_published(1), weights.shards()
            for parameter in weights._parameters.values():  # where they are
                parameter.mul_(2)
            assert_published(2)
            assert all(a is b for a, b in zip(shards, weights.shards(), strict=True))
            for parameter in weights._parameters.values():  # to other memory
                local = getattr(parameter, "_local_tensor", parameter)
                local.data = 2 * local.data
            assert_published(4)
            assert not any(a is b for a, b in zip(shards, weights.shards(), strict=True))
        if dist.get_rank() == 0:
            sizes = [h.nbytes for h in handles]
            shares[f"{folder[-5:]} {degrees}"] = max(sizes) / sum(sizes)
        publisher.close()
if dist.get_rank() == 0:
    print(json.dumps(shares))
dist.destroy_process_group()
"""


def run_ranks(count, degrees, *folders):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {**os.environ, **worker_env(1, role="trainer"), "PYTHONPATH": os.getcwd()}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    command = [sys.executable, "-c", SCRIPT, json.dumps(degrees), *map(str, folders)]
    ranks = [
        subprocess.Popen(
            command,
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, (_, errors) in zip(ranks, said, strict=True):
        assert rank.returncode == 0, errors[-3000:]
    return json.loads(said[0][0].splitlines()[-1])


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        (1, [(1, 1, 1)]),
        (2, [(1, 2, 1), (1, 1, 2), (2, 1, 1)]),
        (4, [(1, 4, 1), (1, 2, 2), (2, 2, 1)]),
    ],
    ids=["one", "two", "four"],
)
def test_ranks_publish_the_model_between_them(tiny_model, moe_model, ranks, degrees):
    shares = run_ranks(ranks, degrees, tiny_model, moe_model)
    assert len(shares) == 2 * len(degrees)
    for case, share in shares.items():
        _, shard, tensor_parallel = json.loads(case[6:])
        # No rank has more than its part, but for the small tensors that all ranks have.
        assert share < 1.05 / (shard * tensor_parallel), case


@pytest.mark.parametrize("fixture", ["tiny_model", "moe_model"])
def test_every_row_of_every_parameter_goes_to_exactly_one_place(fixture, request):
    folder = request.getfixturevalue(fixture)
    spec = model_spec(folder)
    traced = trace_rows(spec, spec.state_dict_adapter(spec.model, str(folder)))
    for name, parameter in titan_model(folder).named_parameters():
        rows = sorted(row for origin in traced[name] for row in origin.rows.tolist())
        assert rows == list(range(parameter.shape[0])), name
