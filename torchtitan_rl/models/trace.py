"""A rank traced: its own code run on tensors without memory, in a process group without processes.

A `Trace` takes the place of the device. What touches a tensor of the model runs on fake tensors,
which have shapes and dtypes only; what the host does before (where documents lie, which tokens
train) runs for real, since the code branches on it. Every operation is seen on its way: the memory
that it takes and gives back, its floating-point operations, its collectives.

The code is that of the assumed device, also where this machine has none: `assume_device`. Fake
tensors are on the CPU all the same, because a CPU build of torch cannot do autograd on others.

Written for torch 2.13, whose fake tensors and flop formulas it extends.
"""

import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import flop_counter
from torch.utils._pytree import arg_tree_leaves, tree_leaves
from torchtitan.models.common.moe import RoutedExperts

from torchtitan_rl.batching.microbatch import Microbatch
from torchtitan_rl.models.rank import ModelRank, Predicted
from torchtitan_rl.models.router_replay import find_routers, replay_routing

aten = torch.ops.aten

MANY = 64
"""Tensors of one operation, as of an optimizer's step on all weights."""
Kind = Literal["weights", "gradients", "optimizer", "tables", "gathered", "activations"]
"""What memory is for: this rank's shards of the weights, their gradients, the optimizer's states,
buffers of the model (frequencies of its rotations), buffers of FSDP (weights gathered from other
ranks, gradients on their way), and all else."""


@dataclass(slots=True, eq=False)
class Block:
    """Memory of one tensor and its views."""

    nbytes: int
    kind: Kind = "activations"


@dataclass(frozen=True, slots=True)
class Collective:
    """One call of a collective on this rank."""

    name: str
    """Name that torch gives it: `_allgather_base_`, `all_reduce` and others."""
    nbytes: int
    """Bytes of its largest tensor: what is gathered, scattered or reduced."""
    ranks: tuple[int, ...]
    """Its process group."""

    @property
    def wire_bytes(self) -> float:
        """Bytes that each rank sends, and receives, by a ring: (n - 1) / n of what is gathered or
        scattered, and twice that of what is reduced for all."""
        n = len(self.ranks)
        rounds = 2 if "allreduce" in self.name.replace("_", "") else 1
        return rounds * self.nbytes * (n - 1) / n


@dataclass(slots=True)
class Work:
    """What a rank did in one phase."""

    flops: Counter[str] = field(default_factory=Counter)
    """Floating-point operations by operation."""
    collectives: list[Collective] = field(default_factory=list)
    operations: Counter[str] = field(default_factory=Counter)
    """Calls by operation."""
    moved_bytes: int = 0
    """Bytes that the operations read and write; views and collectives not."""
    reads: int = 0
    """Times that the host asked for a value: on a GPU it waits for all that was asked of it."""

    @property
    def attention_flops(self) -> int:
        """Floating-point operations between queries, keys and values."""
        return sum(count for name, count in self.flops.items() if "att" in name)


@dataclass(slots=True)
class Seen:
    """What a trace has seen."""

    events: list[tuple[Block, int, str]] = field(default_factory=list)
    """Changes of memory in order: whose, by how many bytes, and in which phase."""
    work: defaultdict[str, Work] = field(default_factory=lambda: defaultdict(Work))
    """What was done, by phase."""

    def peak(
        self, phases: Iterable[str], *, held: Mapping[Kind, int] | None = None
    ) -> Counter[Kind]:
        """Memory by kind at the moment of some phases at which it is most. Kinds in `held` are
        there from the beginning and stay, whatever was traced of them."""
        now: Counter[Kind] = Counter(held or {})
        most, highest = Counter(now), sum(now.values())
        total, wanted = highest, set(phases)
        for block, change, phase in self.events:
            if held and block.kind in held:
                continue
            now[block.kind] += change
            total += change
            if total > highest and phase in wanted:
                most, highest = Counter(now), total
        return most


class Trace(FakeTensorMode):
    """The mode in which a rank is traced; as a context it is where memory is allocated.

    Example:
        with fake_group(world_size=64), assume_device("cuda"):
            trace = Trace()
            rank = TracedRank(trace, folder, parallelism, dtype="bfloat16", seed=0)
            with trace:
                rank.predict(cell).logprobs.sum().backward()
            trace.seen.peak([""])
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.seen = Seen()
        self.phase = ""
        """What is going on, for `Seen.peak`."""
        self.on_host = False
        """Whether tensors made from nothing are the host's: real ones."""
        self._blocks: dict[int, Block] = {}
        self._depth = 0

    def __enter__(self) -> "Trace":
        if not self._depth:
            _watch_resizing(self)
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._depth -= 1
        if not self._depth:
            _watch_resizing(None)

    def dispatch(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        leaves = arg_tree_leaves(*args, **kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if all(map(_is_real, tensors)) if tensors else self.on_host and not self._is_nested:
            if func is torch.ops._c10d_functional.all_to_all_single.default:
                return args[0].clone()  # rows for each expert: all ranks have as many
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            self.seen.work[self.phase].reads += 1
            return _one(args[0].dtype)
        if func is aten.nonzero.default:  # of what is wrong with values: nothing
            self.seen.work[self.phase].reads += 1
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        out: Any
        if len(tensors) > MANY:  # their key for the cache of results takes longer than the result
            out = self._dispatch_impl(func, types, args, kwargs)
        else:
            out = super().dispatch(func, types, args, kwargs)
        if out is not NotImplemented and not self._is_nested:
            self._see(func, args, kwargs, out, tensors)
        return out

    @property
    def _is_nested(self) -> bool:
        """Whether an operation is part of finding out about another: a DTensor enters the mode once
        more to learn the shape of a whole result, of which a rank has its share only."""
        return self._depth > 1

    def _see(
        self,
        func: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
        given: Sequence[torch.Tensor],
    ) -> None:
        packet, work = func._overloadpacket, self.seen.work[self.phase]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, FakeTensor)]
        work.operations[str(packet)] += 1
        if (formula := FLOPS.get(packet)) is not None:
            work.flops[str(packet)] += formula(*args, **kwargs, out_val=out)
        if func in collective_ops:
            if func not in sync_ops:
                work.collectives.append(_collective(func, args, kwargs, out))
        elif given and not func.is_view:
            work.moved_bytes += sum(t.numel() * t.element_size() for t in (*given, *made))
        kind = None
        for tensor in made:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._blocks:
                kind = kind or _kind_of_new()
                self._own(storage, kind)

    def _own(self, storage: torch.UntypedStorage, kind: Kind) -> None:
        block = self._blocks[storage._cdata] = Block(storage.nbytes(), kind)
        self._changed(block, block.nbytes)
        weakref.finalize(storage, self._freed, storage._cdata).atexit = False

    def _freed(self, key: int) -> None:
        if block := self._blocks.pop(key, None):
            self._changed(block, -block.nbytes)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage has another size, as FSDP gives those of gathered weights."""
        if block := self._blocks.get(storage._cdata):
            change = storage.nbytes() - block.nbytes
            block.nbytes += change
            self._changed(block, change)

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self.phase = phase

    def _changed(self, block: Block, nbytes: int) -> None:
        if nbytes:
            self.seen.events.append((block, nbytes, self.phase))

    def label(self, tensors: Iterable[torch.Tensor], kind: Kind) -> int:
        """Say what the memory of tensors is for, also that it was; returns its bytes."""
        found: dict[int, Block] = {}  # gradients of several weights may lie in one block
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if block := self._blocks.get(local.untyped_storage()._cdata):
                block.kind = kind
                found[id(block)] = block
        return sum(block.nbytes for block in found.values())


def _collective(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> Collective:
    group = CollectiveOp.get_process_group(func, args)
    ranks = tuple(dist.get_process_group_ranks(group))
    size, name = CollectiveOp.get_comm_tensor_size(func, out, args, kwargs), func._overloadpacket
    if func in CollectiveOp.COMM_TENSOR_ARG_0_AND_RES:  # what goes and what comes, together
        size //= 2
    return Collective(name.__name__, size, ranks)


def _is_real(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == "cpu"


def _one(dtype: torch.dtype) -> float | int | bool:
    """What the host reads where a trace has no value: 1, which is finite, and true."""
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def _kind_of_new() -> Kind:
    """What memory is for that is allocated now: FSDP's own, or another's."""
    frame = sys._getframe(3)
    for _ in range(14):
        if frame is None:
            break
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.fsdp"):
            return "gathered"
        frame = frame.f_back  # type: ignore[assignment]
    return "activations"


_resize = torch.UntypedStorage.resize_


def _watch_resizing(trace: Trace | None) -> None:
    """Have a trace told of resized storages, which no operation shows; None: no longer."""

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        done = _resize(storage, size)
        if trace is not None:
            trace.resized(storage)
        return done

    torch.UntypedStorage.resize_ = _resize if trace is None else resize  # type: ignore


@contextmanager
def fake_group(world_size: int, *, rank: int = 0) -> Iterator[None]:
    """A process group of that size of which only this rank exists; its collectives do nothing."""
    threads = torch._C._is_multithreading_enabled()  # what a rank switches off
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.autograd.set_multithreading_enabled(threads)


class TracedRank(ModelRank):
    """A rank whose model has no memory; in the block of `fake_group`."""

    def __init__(self, trace: Trace, folder: str, *args: Any, **options: Any) -> None:
        self._trace = trace
        super().__init__(
            folder, *args, **options, join=lambda: torch.device("cpu"), allocating=trace
        )
        self.weight_bytes = trace.label(self.model.parameters(), "weights")
        self.table_bytes = trace.label(self.model.buffers(), "tables")
        self.gradient_bytes = 0
        self._passes = 0
        self.model.register_forward_pre_hook(self._leave_host, prepend=True)
        for module in self.model.modules():
            if isinstance(module, RoutedExperts):
                module.register_forward_pre_hook(_count_rows)

    def _leave_host(self, *_: Any) -> None:
        self._trace.on_host = False

    def predict(self, cell: Microbatch, *, keep_hidden: bool = False) -> Predicted:
        self._passes += torch.is_grad_enabled()
        self._trace.phase = f"pass {self._passes}" if torch.is_grad_enabled() else "inference"
        self._trace.on_host = True  # until the model is called
        try:
            return super().predict(cell, keep_hidden=keep_hidden)
        finally:
            self._trace.on_host = False

    def clip_gradients(self, most: float) -> torch.Tensor:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.gradient_bytes = self._trace.label(gradients, "gradients")
        self._trace.phase = "optimizer"
        return super().clip_gradients(most)

    def replaying(self, cell: Microbatch, *, on: bool) -> AbstractContextManager[None]:
        """A balanced routing in the place of the router's own, which has no values."""
        routers = find_routers(self.model)
        if not routers:
            return super().replaying(cell, on=False)
        experts, top_k = routers[0].num_experts, routers[0].top_k
        numbers = torch.from_numpy(np.arange(cell.tokens * top_k) % experts)
        routing = numbers.view(cell.tokens, 1, top_k).expand(-1, len(routers), -1)
        return replay_routing(self.model, routing)


def _count_rows(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
    """The rows of each expert, as real numbers: experts on a CPU are computed one by one."""
    *before, chosen, counts = args
    if not _is_real(chosen):
        return None
    return *before, chosen, torch.bincount(chosen.flatten(), minlength=len(counts))


# ---- formulas that torch's own FlopCounterMode lacks ------------------------------------------


def _grouped_mm(
    a: Sequence[int], b: Sequence[int], *_: Any, out_shape: Any = None, **__: Any
) -> int:
    """Rows [rows, k] times the matrix of their group [groups, k, n]; or, for a gradient,
    [k, rows] times [rows, n]."""
    return 2 * a[-2] * a[-1] * b[-1]


def _onednn_linear(
    x: Sequence[int], weight: Sequence[int], *_: Any, out_shape: Any = None, **__: Any
) -> int:
    return 2 * x[0] * x[1] * weight[0]


def _cpu_flash(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, out_shape: Any = None, **__: Any
) -> int:
    return flop_counter.sdpa_flop_count(q, k, v)


def _cpu_flash_backward(
    grad: Sequence[int],
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    *_: Any,
    out_shape: Any = None,
    **__: Any,
) -> int:
    return flop_counter.sdpa_backward_flop_count(grad, q, k, v)


EXTRA_FORMULAS: dict[Any, Any] = {
    aten._grouped_mm: _grouped_mm,
    torch.ops.mkldnn._linear_pointwise: _onednn_linear,
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_flash,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_flash_backward,
}
"""Formulas by operation, for `custom_mapping` of a FlopCounterMode."""
FLOPS: dict[Any, Any] = {
    **flop_counter.flop_registry,
    **{packet: flop_counter.shape_wrapper(f) for packet, f in EXTRA_FORMULAS.items()},
}
