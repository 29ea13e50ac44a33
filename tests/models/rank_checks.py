"""One of four processes that form groups of gloo ranks: all four, then two of them, then one alone.

    python -m tests.models.rank_checks FOLDER

Starting a rank takes longer than all that is checked, so the groups follow one another. FOLDER has
`task.pickle`, a `Task`; rank 0 writes `found.pickle`, a `Found`.
"""

import contextlib
import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from tests.models.support import forward
from torchtitan_rl.config.parallelism import Parallelism
from torchtitan_rl.models.checkpoint import load_hf
from torchtitan_rl.models.parallel import build_parallel_model
from torchtitan_rl.models.router_replay import find_routers, replay_routing
from torchtitan_rl.models.shards import LocalWeights
from torchtitan_rl.models.spec import model_spec
from torchtitan_rl.weight_sync.handle import merge_handles
from torchtitan_rl.weight_sync.reading import open_snapshot
from torchtitan_rl.weight_sync.transport import make_publisher

PUBLISHED = {
    4: ((1, 4, 1), (1, 2, 2), (2, 2, 1)),
    2: ((1, 2, 1), (1, 1, 2), (2, 1, 1)),
    1: ((1, 1, 1),),
}
"""By number of ranks: degrees of replication, sharding and tensor parallelism."""
REPLAYED = {"sharded": (1, 2, 1), "tensor parallel": (1, 1, 2)}


@dataclass(slots=True)
class Task:
    """What the ranks are given."""

    folders: dict[str, str]
    """Model folders by name."""
    tokens: torch.Tensor
    """[rows, length]"""
    routing: torch.Tensor
    """[rows * length, layers with experts, top_k] experts to replay in the model named `moe`."""


@dataclass(slots=True)
class Found:
    """What rank 0 has seen."""

    shares: dict[tuple[str, tuple[int, int, int]], float] = field(default_factory=dict)
    """Largest share of the bytes that one rank has published, by model and degrees."""
    replays: dict[str, Any] = field(default_factory=dict)
    """Chosen experts, logits and gradients, by a name in REPLAYED."""


@contextlib.contextmanager
def group_of(size: int, folder: Path) -> Iterator[None]:
    store = dist.FileStore(str(folder / f"store-{size}"), size)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=size)
    yield
    dist.barrier()
    dist.destroy_process_group()


def parallel_model(folder: str, degrees: tuple[int, int, int]) -> tuple[nn.Module, LocalWeights]:
    spec = model_spec(folder)
    replicate, shard, tensor_parallel = degrees
    parallelism = Parallelism(
        data_parallel_replicate_degree=replicate,
        data_parallel_shard_degree=shard,
        tensor_parallel_degree=tensor_parallel,
    )
    model, _ = build_parallel_model(
        spec, parallelism, dtype="float32", activation_checkpoint="full"
    )
    adapter = spec.state_dict_adapter(spec.model, folder)
    weights = LocalWeights(model, spec, adapter)
    load_hf(model, adapter, folder)
    return model, weights


def check_published(folder: str, degrees: tuple[int, int, int]) -> float:
    """Put together, what the ranks publish is the model, to the byte. Returns the largest share of
    one rank."""
    model, weights = parallel_model(folder, degrees)
    publisher = make_publisher("shm")
    expected = load_file(folder + "/model.safetensors")
    expected.pop("lm_head.weight", None)

    def assert_published(times: int) -> list[Any]:
        handle = publisher.publish(weights.shards(), version=0)
        handles: list[Any] = [None] * dist.get_world_size()
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
        forward(model, torch.arange(12).view(1, 12))  # FSDP leaves some parameters gathered
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
    publisher.close()
    sizes = [handle.nbytes for handle in handles]
    return max(sizes) / sum(sizes)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def replay(task: Task, degrees: tuple[int, int, int]) -> tuple[Any, torch.Tensor, dict[str, Any]]:
    """Chosen experts, logits and gradients of the model with experts."""
    model, _ = parallel_model(task.folders["moe"], degrees)
    chosen: list[torch.Tensor] = []
    for router in find_routers(model):
        router.register_forward_hook(lambda _, __, out: chosen.append(full(out[1]).flatten(0, 1)))
    with replay_routing(model, task.routing):
        logits = full(forward(model, task.tokens))
        logits.log_softmax(-1)[..., 7].sum().backward()
    gradients = {
        name.replace("_checkpoint_wrapped_module.", ""): full(parameter.grad).clone()
        for name, parameter in model.named_parameters()
    }
    return chosen, logits.detach(), gradients


def main(folder: Path) -> None:
    torch.autograd.set_multithreading_enabled(False)
    task: Task = pickle.loads((folder / "task.pickle").read_bytes())
    found = Found()
    for size, published in PUBLISHED.items():
        if int(os.environ["RANK"]) >= size:
            return
        with group_of(size, folder):
            for name, model in task.folders.items():
                for degrees in published:
                    found.shares[name, degrees] = check_published(model, degrees)
            if size == 2:
                for name, degrees in REPLAYED.items():
                    found.replays[name] = replay(task, degrees)
    (folder / "found.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    # By its full name: what is pickled here is read elsewhere.
    from tests.models import rank_checks

    rank_checks.main(Path(sys.argv[1]))
