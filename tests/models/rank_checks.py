"""A process of four that form groups of gloo ranks: all four, then two of them, then one alone.

    python -m tests.models.rank_checks FOLDER

The ranks check by themselves what they publish, what they move to host memory, and what they resume
from. Starting a rank takes longer than all that is checked, so the groups follow one another.
FOLDER has `task.pickle`, a `Task`; rank 0 writes `found.pickle`, a `Found`.
"""

import contextlib
import os
import pickle
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from tests.models.support import forward, titan_model
from tests.reads import counting
from torchtitan_rl.config.parallelism import Parallelism
from torchtitan_rl.config.trainer import Checkpointing, GradientSync
from torchtitan_rl.models.checkpoint import Checkpoints, TrainState, load_hf
from torchtitan_rl.models.offload import HostMemory
from torchtitan_rl.models.parallel import build_parallel_model, expect_backward
from torchtitan_rl.models.router_replay import find_routers, replay_routing
from torchtitan_rl.models.shards import LocalWeights
from torchtitan_rl.models.spec import model_spec
from torchtitan_rl.weight_sync.handle import merge_handles
from torchtitan_rl.weight_sync.reading import open_snapshot
from torchtitan_rl.weight_sync.transport import make_publisher

Degrees = tuple[int, int, int, int]
"""Degrees of replication, sharding, tensor parallelism and expert parallelism."""
PUBLISHED: dict[str, dict[int, tuple[Degrees, ...]]] = {
    "tiny": {
        4: ((1, 4, 1, 1), (1, 2, 2, 1), (2, 2, 1, 1)),
        2: ((1, 2, 1, 1), (1, 1, 2, 1), (2, 1, 1, 1)),
        1: ((1, 1, 1, 1),),
    },
    "moe": {
        4: ((1, 4, 1, 1), (1, 2, 2, 1), (2, 2, 1, 1), (1, 4, 1, 2), (2, 2, 1, 2)),
        2: ((1, 2, 1, 1), (1, 1, 2, 1), (2, 1, 1, 1), (1, 2, 1, 2)),
        1: ((1, 1, 1, 1),),
    },
    "qwen2": {4: ((1, 2, 2, 1),), 2: ((1, 2, 1, 1),), 1: ()},
    "llama3": {4: (), 2: ((1, 1, 2, 1),), 1: ()},
    "smollm3": {4: (), 2: ((1, 1, 2, 1),), 1: ()},
}
"""What is published, by model and number of ranks."""
REPLAYED: dict[str, Degrees] = {
    "sharded": (1, 2, 1, 1),
    "tensor parallel": (1, 1, 2, 1),
    "expert parallel": (1, 2, 1, 2),
}
"""How routing is replayed on two ranks."""
ACCUMULATED: dict[str, tuple[Degrees, Checkpointing]] = {
    "copies": ((2, 2, 1, 1), "none"),
    "experts": ((1, 4, 1, 2), "selective"),
    "experts of copies": ((2, 2, 1, 2), "full"),
}
"""How the gradients of several microbatches are added up on four ranks."""

RESUMED: tuple[Degrees, ...] = ((1, 4, 1, 2), (2, 2, 1, 2), (1, 4, 1, 4))
"""What is saved by the first degrees is resumed by each, with experts on several ranks."""


@dataclass(slots=True)
class Task:
    """What the ranks are given."""

    folders: dict[str, str]
    """Model folders by name."""
    tokens: torch.Tensor
    """[rows, length]"""
    routing: torch.Tensor
    """[rows * length, layers with experts, top_k] experts to replay in the model named `moe`."""
    microbatches: list[torch.Tensor]
    """[1, length] tokens each; dealt out to the ranks in turn, the same number to all."""


@dataclass(slots=True)
class Found:
    """What rank 0 has seen."""

    shares: dict[tuple[str, Degrees], float] = field(default_factory=dict)
    """Largest share of the bytes that one rank has published, by model and degrees."""
    replays: dict[str, Any] = field(default_factory=dict)
    """Chosen experts, logits and gradients, by a name in REPLAYED."""
    accumulated: dict[tuple[str, GradientSync], "Accumulated"] = field(default_factory=dict)
    """By a name in ACCUMULATED, and when gradients were added up."""


@dataclass(slots=True)
class Accumulated:
    """The gradient of several microbatches."""

    gradients: dict[str, torch.Tensor]
    norm: float
    collectives: Counter[str]
    """Number of calls of each collective on rank 0."""


@contextlib.contextmanager
def group_of(size: int, folder: Path) -> Iterator[None]:
    store = dist.FileStore(str(folder / f"store-{size}"), size)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=size)
    yield
    dist.barrier()
    dist.destroy_process_group()


def parallel_model(
    folder: str, degrees: Degrees, activation_checkpoint: Checkpointing = "full"
) -> tuple[nn.Module, LocalWeights]:
    spec = model_spec(folder)
    replicate, shard, tensor_parallel, expert_parallel = degrees
    parallelism = Parallelism(
        data_parallel_replicate_degree=replicate,
        data_parallel_shard_degree=shard,
        tensor_parallel_degree=tensor_parallel,
        expert_parallel_degree=expert_parallel,
    )
    model, _ = build_parallel_model(
        spec, parallelism, dtype="float32", activation_checkpoint=activation_checkpoint
    )
    adapter = spec.state_dict_adapter(spec.model, folder)
    weights = LocalWeights(model, spec, adapter)
    load_hf(model, adapter, folder)
    return model, weights


def check_published(folder: str, degrees: Degrees) -> float:
    """Together the ranks compute what one does; put together, what they publish is the model, to
    the byte. Returns the largest share of one rank."""
    model, weights = parallel_model(folder, degrees)
    publishers = [make_publisher("shm"), make_publisher("collective")]
    expected = load_file(folder + "/model.safetensors")

    def assert_published(times: int) -> list[Any]:
        for publisher in publishers:
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
        tokens = torch.arange(40).view(1, 40)
        logits = full(forward(model, tokens))  # FSDP leaves some parameters gathered
        whole = forward(titan_model(Path(folder)), tokens)
        torch.testing.assert_close(logits, whole, rtol=0, atol=1e-5)
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
    for publisher in publishers:
        publisher.close()
    sizes = [handle.nbytes for handle in handles]
    return max(sizes) / sum(sizes)


def check_offload(folder: str, degrees: Degrees) -> None:
    """A model whose weights and optimizer states were in host memory between two steps trains and
    publishes like one that kept them, to the bit."""
    trained = []
    for moves in (False, True):
        model, weights = parallel_model(folder, degrees)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        memory, publisher = HostMemory(), make_publisher("shm")
        for step in range(3):
            if moves and step:
                tensors = [*model.parameters(), *states_of(optimizer)]
                held = [local(tensor).untyped_storage() for tensor in tensors]
                memory.offload(tensors)
                assert not any(storage.nbytes() for storage in held)
                memory.restore()
            forward(model, torch.arange(12).view(1, 12)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            # Converted: torch does not resize memory that NumPy has seen.
            handle = publisher.publish(weights.shards(), step, dtype=torch.bfloat16)
        # What the snapshot holds is found out by the checksums that go with it.
        trained.append([handle.parts[0].checksums, *(full(p).clone() for p in model.parameters())])
        publisher.close()
        dist.barrier()
    (one, *kept), (other, *moved) = trained
    assert one == other
    assert all(map(torch.equal, kept, moved))


def check_resumed(folder: str, checkpoints: Path, *degrees: Degrees) -> None:
    """A trainer that saves and is resumed goes on like one that did not stop, to the bit. By any
    other degrees it resumes from the same weights and optimizer states."""
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    def start(own: Degrees) -> Started:
        model, spec = parallel_model(folder, own)[0], model_spec(folder)
        optimizers = default_adamw(lr=1e-2).build(model_parts=[model])
        schedule = LRSchedulersContainer.Config(warmup_steps=3)
        schedules = schedule.build(optimizers=optimizers, training_steps=9)
        return Started(model, optimizers, schedules, spec.state_dict_adapter(spec.model, folder))

    first = start(degrees[0])
    first.step()
    saving = first.checkpoints(checkpoints, TrainState(step=1, policy_version=4))
    saving.save(1)
    saved = first.values()
    first.step()
    for own in degrees:
        again, state = start(own), TrainState()
        again.checkpoints(checkpoints, state).load(resume=True)
        assert (state.step, state.policy_version) == (1, 4)
        assert_same(again.values(), saved, own)
        if own == degrees[0]:
            again.step()
            assert_same(again.values(), first.values(), own)
    dist.barrier()


@dataclass(slots=True)
class Started:
    """A model with what trains it."""

    model: nn.Module
    optimizers: Any
    schedules: Any
    adapter: Any

    def step(self) -> None:
        rows = torch.arange(24).view(2, 12)[dist.get_rank() % 2 :]
        forward(self.model, rows[:1]).float().square().mean().backward()
        self.optimizers.step()
        self.schedules.step()
        self.optimizers.zero_grad()

    def checkpoints(self, folder: Path, state: TrainState) -> Checkpoints:
        return Checkpoints(
            folder=str(folder),
            keep=2,
            model=self.model,
            optimizers=self.optimizers,
            lr_schedulers=self.schedules,
            state=state,
            adapter=self.adapter,
        )

    def values(self) -> dict[str, torch.Tensor]:
        """Weights and optimizer states, whole."""
        own = {n: p.detach() for n, p in self.model.named_parameters()}
        tensors = own | {n: t for n, t in self.optimizers.state_dict().items() if t is not None}
        return {name: full(t).clone() for name, t in tensors.items() if isinstance(t, torch.Tensor)}


def assert_same(
    found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], degrees: Degrees
) -> None:
    assert found.keys() == wanted.keys()
    different = [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)]
    assert not different, (degrees, different)


def states_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, torch.Tensor)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def replay(task: Task, degrees: Degrees) -> tuple[Any, torch.Tensor, dict[str, Any]]:
    """Chosen experts, logits and gradients of the model with experts."""
    model, _ = parallel_model(task.folders["moe"], degrees)
    chosen: list[torch.Tensor] = []
    for router in find_routers(model):
        router.register_forward_hook(lambda _, __, out: chosen.append(full(out[1]).flatten(0, 1)))
    with replay_routing(model, task.routing):
        logits = full(forward(model, task.tokens))
        logits.log_softmax(-1)[..., 7].sum().backward()
    return chosen, logits.detach(), gradients_of(model)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name.replace("_checkpoint_wrapped_module.", ""): full(parameter.grad).clone()
        for name, parameter in model.named_parameters()
    }


def accumulate(task: Task, name: str) -> Iterator[tuple[GradientSync, Accumulated]]:
    """The gradient of all microbatches of all ranks, added up in either way; and an optimizer step
    by it."""
    # Not before torchtitan_rl.models has prepared for it.
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.distributed.utils import clip_grad_norm_

    degrees, activation_checkpoint = ACCUMULATED[name]
    model, _ = parallel_model(task.folders["moe"], degrees, activation_checkpoint)
    own = task.microbatches[dist.get_rank() :: dist.get_world_size()]
    parameters, experts = list(model.parameters()), degrees[-1] > 1
    for sync in get_args(GradientSync):
        collectives: Counter[str] = Counter()
        with counting(Counter(), collectives):
            for number, tokens in enumerate(own, 1):
                expect_backward(model, last=number == len(own), sync=sync)
                forward(model, tokens).log_softmax(-1)[..., 7].sum().backward()
        found = gradients_of(model)
        norm = clip_grad_norm_(parameters, 1.0, foreach=True, ep_enabled=experts).item()
        yield sync, Accumulated(found, norm, collectives)
        if sync == "last_microbatch":
            default_adamw(lr=1e-3).build(model_parts=[model]).step()
            assert all(full(parameter).isfinite().all() for parameter in parameters)
        model.zero_grad()


def main(folder: Path) -> None:
    torch.autograd.set_multithreading_enabled(False)
    task: Task = pickle.loads((folder / "task.pickle").read_bytes())
    found = Found()
    for size in (4, 2, 1):
        if int(os.environ["RANK"]) >= size:
            return
        with group_of(size, folder):
            for name, model in task.folders.items():
                for degrees in PUBLISHED[name][size]:
                    found.shares[name, degrees] = check_published(model, degrees)
            if size == 4:
                for name in ACCUMULATED:
                    for sync, accumulated in accumulate(task, name):
                        found.accumulated[name, sync] = accumulated
                check_resumed(task.folders["moe"], folder / "checkpoints", *RESUMED)
            if size == 2:
                for degrees in REPLAYED.values():
                    check_offload(task.folders["moe" if degrees[-1] > 1 else "tiny"], degrees)
                for name, degrees in REPLAYED.items():
                    found.replays[name] = replay(task, degrees)
    (folder / "found.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    # By its full name: what is pickled here is read elsewhere.
    from tests.models import rank_checks

    rank_checks.main(Path(sys.argv[1]))
