"""Building a torchtitan model on this process's share of the mesh: FSDP2, tensor and expert
parallelism, activation checkpointing, torch.compile; and when its gradients are added up."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    FullAC,
    SelectiveAC,
)
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl.config.parallelism import Parallelism
from torchtitan_rl.config.trainer import Checkpointing, GradientSync
from torchtitan_rl.models.cpu.attention import PackedAttention
from torchtitan_rl.platform import (
    Dtype,
    adapt_parallelized_model,
    device_type,
    resolve_dtype,
)


def build_parallel_model(
    spec: ModelSpec,
    parallelism: Parallelism,
    *,
    dtype: Dtype,
    activation_checkpoint: Checkpointing = "none",
    compile: bool = False,
    inference: bool = False,
    device: torch.device | None = None,
    allocating: AbstractContextManager[object] | None = None,
) -> tuple[nn.Module, ParallelDims]:
    """The model with allocated memory and initialised buffers; the caller loads the weights.

    The default process group must exist. `device` is where the memory is, by default this
    machine's; it is allocated in the context `allocating`. For `inference` weights are in the
    dtype of the computation, and FSDP, which would gather them, is left out.
    """
    titan = ParallelismConfig(
        data_parallel_replicate_degree=parallelism.data_parallel_replicate_degree,
        data_parallel_shard_degree=parallelism.data_parallel_shard_degree,
        tensor_parallel_degree=parallelism.tensor_parallel_degree,
        expert_parallel_degree=parallelism.expert_parallel_degree,
        # The backend that runs on gloo as well as on NCCL.
        spmd_backend="partial_dtensor",
        # Sequence parallelism needs row lengths that the degree divides; ours vary with episodes.
        enable_sequence_parallel=False,
    )
    parallel_dims = ParallelDims.from_config(titan, parallelism.world_size)
    dist_utils.set_spmd_backend(titan.spmd_backend)
    spec.model.update_from_config(config=_ParallelismOnly(titan))
    with torch.device("meta"):
        model = spec.model.build()
    if inference:
        model.to(getattr(torch, resolve_dtype(dtype)))
    # A single CPU rank has nothing to shard and computes in the dtype of its weights, so FSDP's
    # hooks would only cost time. On a GPU they also cast to the compute dtype.
    alone = parallelism.world_size == 1 and device_type() == "cpu"
    if compile:
        allow_recompiles()
    model = spec.parallelize_fn(
        model,
        parallel_dims=parallel_dims,
        training=TrainingConfig(
            mixed_precision_param=resolve_dtype(dtype), disable_cuda_graphs=True
        ),
        parallelism=titan,
        compile_config=CompileConfig(enable=compile and device_type() == "cuda"),
        ac_config=_checkpointing(activation_checkpoint),
        dump_folder="",
        skip_dp=alone or inference,
    )
    if compile and device_type() == "cpu":
        compile_layers_on_cpu(model)
    with allocating or nullcontext(), torch.no_grad():
        model.to_empty(device=device or device_type())
        model.init_weights()
    adapt_parallelized_model(model)
    model.train()
    return model, parallel_dims


@dataclass
class _ParallelismOnly:
    """The part of torchtitan's trainer config that a torchtitan model config reads."""

    parallelism: ParallelismConfig


def _checkpointing(kind: Checkpointing) -> ActivationCheckpointing.Config | None:
    """torchtitan's own policy; `auto` is its default on a GPU."""
    if kind == "auto":
        kind = "selective" if device_type() == "cuda" else "none"
    return {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}[kind]


RECOMPILES = 64
"""Programs that torch.compile may make of a layer. Dense layers and those with experts, with a
gradient and without, routing that is replayed or not, prompts that are shared or not, rows of one
token and longer ones have programs of their own; beyond torch's limit of 8 a GPU's would fail."""


def allow_recompiles() -> None:
    """Let torch.compile make as many programs of a layer as there are cases."""
    import torch._dynamo  # takes a second, which only those who compile should wait

    torch._dynamo.config.recompile_limit = RECOMPILES


def compile_layers_on_cpu(model: nn.Module, *, backend: str = "inductor") -> None:
    """Compile the forward pass of each layer around its attention, which torch.compile cannot see
    through on a CPU. torchtitan's own way, used on a GPU, compiles a layer whole or fails."""
    for attention in filter(lambda m: isinstance(m, PackedAttention), model.modules()):
        attention.forward = torch.compiler.disable(attention.forward)
    for layer in model.get_submodule("layers").children():
        block = getattr(layer, "_checkpoint_wrapped_module", layer)
        # The function and not the module, so that FSDP's hooks stay outside.
        block.forward = torch.compile(block.forward, backend=backend, dynamic=True)


# ---- gradients of several microbatches ----------------------------------------------------------


def expect_backward(model: nn.Module, *, last: bool, sync: GradientSync) -> None:
    """Tell FSDP2 whether the next backward pass is the last of an update, whose gradients are those
    of all its passes. All ranks say the same, so that their collectives meet."""
    if not isinstance(model, FSDPModule):
        return
    now = last or sync == "every_microbatch"
    model.set_requires_gradient_sync(now)
    # Sums over replicas can always wait: until then a rank holds its shard's, as large as the
    # gradient that they become.
    model.set_requires_all_reduce(last)
    model.set_is_last_backward(now)


def discard_gradients(model: nn.Module) -> None:
    """Forget the gradients of an update that an error has ended, and let FSDP2 start anew."""
    if isinstance(model, FSDPModule):
        model.reset_iter_state()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                _discard_unreduced(module)
    for parameter in model.parameters():
        parameter.grad = None


def _discard_unreduced(module: FSDPModule) -> None:
    """Drop the gradients that a module has not reduced yet. torch 2.13's `reset_iter_state` says
    that it does, and leaves them."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
