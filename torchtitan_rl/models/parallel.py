"""Building a torchtitan model on this process's share of the mesh: FSDP2 and tensor parallelism."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl.config.parallelism import Parallelism
from torchtitan_rl.platform import Dtype, adapt_parallelized_model, device_type, resolve_dtype


def build_parallel_model(
    spec: ModelSpec,
    parallelism: Parallelism,
    *,
    dtype: Dtype,
    activation_checkpoint: Literal["none", "full"],
) -> tuple[nn.Module, ParallelDims]:
    """The model with allocated memory and initialised buffers; the caller loads the weights.

    The default process group must exist.
    """
    titan = ParallelismConfig(
        data_parallel_replicate_degree=parallelism.data_parallel_replicate_degree,
        data_parallel_shard_degree=parallelism.data_parallel_shard_degree,
        tensor_parallel_degree=parallelism.tensor_parallel_degree,
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
    # A single CPU rank has nothing to shard and computes in the dtype of its weights, so FSDP's
    # hooks would only cost time. On a GPU they also cast to the compute dtype.
    alone = parallelism.world_size == 1 and device_type() == "cpu"
    model = spec.parallelize_fn(
        model,
        parallel_dims=parallel_dims,
        training=TrainingConfig(
            mixed_precision_param=resolve_dtype(dtype), disable_cuda_graphs=True
        ),
        parallelism=titan,
        compile_config=CompileConfig(enable=False),
        ac_config=FullAC.Config() if activation_checkpoint == "full" else None,
        dump_folder="",
        skip_dp=alone,
    )
    model.to_empty(device=device_type())
    with torch.no_grad():
        model.init_weights()
    adapt_parallelized_model(model)
    model.train()
    return model, parallel_dims


@dataclass
class _ParallelismOnly:
    """The part of torchtitan's trainer config that a torchtitan model config reads."""

    parallelism: ParallelismConfig
