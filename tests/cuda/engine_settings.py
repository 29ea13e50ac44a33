"""What vLLM makes of our engine's settings on GPUs: its own config, resolved by its CUDA platform.

    python -m tests.cuda.engine_settings <folder for models>

prints a JSON object: by compute capability and recipe, what was decided; and what a worker of ours
changes in vLLM. In a process of its own, as vLLM chooses its platform once.
"""

import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

# Operators that only vLLM's build for CUDA has; none of them is called here.
sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")

import torch  # noqa: E402
import vllm.config.vllm as vllm_config  # noqa: E402
from vllm import platforms  # noqa: E402
from vllm.platforms.cuda import CudaPlatformBase  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.worker.utils import request_memory  # noqa: E402

from tests.cuda.pretend import CAPABILITIES, model_folder, pretend_gpus  # noqa: E402
from torchtitan_rl.engines.vllm import build  # noqa: E402
from torchtitan_rl.models.spec import build_on_meta, model_spec  # noqa: E402
from torchtitan_rl.platform.nvml import Driver, Gpu  # noqa: E402
from torchtitan_rl.recipes.registry import built_in_recipes  # noqa: E402
from torchtitan_rl.run.checks import resolved  # noqa: E402

TOTAL = 80 * 2**30
FREE = 50 * 2**30
"""Memory of each GPU that nobody uses: less than vLLM asks for by itself."""


class PretendedGpus(CudaPlatformBase):
    """vLLM's platform for CUDA, with eight GPUs that are not there."""

    capability = (8, 0)

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(*cls.capability)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "a GPU"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return TOTAL

    @classmethod
    def device_count(cls) -> int:
        return 8

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return 132

    @classmethod
    def is_fully_connected(cls, device_ids: list[int]) -> bool:
        return True

    @classmethod
    def get_all_device_numa_nodes(cls) -> None:
        return None


def decided(name: str, folder: Path) -> dict[str, Any]:
    """What vLLM decides for the generators of a recipe."""
    config = built_in_recipes()[name]()
    config = resolved(replace(config, model=str(model_folder(config, folder))))
    generator = config.generator
    shapes = {n: p.shape for n, p in build_on_meta(model_spec(config.model)).named_parameters()}
    build.tensor_shapes = lambda _: shapes
    arguments = build.engine_args(config.model, generator.engine, generator.tensor_parallel_degree)
    made = arguments.create_engine_config()
    memory = types.SimpleNamespace(total_memory=TOTAL, free_memory=FREE, device_="cuda:0")
    return {
        "runner": 2 if made.use_v2_model_runner else 1,
        "scheduler": made.scheduler_config.get_scheduler_cls().__name__,
        "batches": made.max_concurrent_batches,
        "executor": made.parallel_config.distributed_executor_backend,
        "worker": made.parallel_config.worker_cls.rpartition(".")[0],
        "ranks": made.parallel_config.world_size,
        "dtype": str(made.model_config.dtype),
        "graphs": made.compilation_config.cudagraph_mode.name,
        "largest_graph": max(made.compilation_config.cudagraph_capture_sizes),
        "kv_cache": made.cache_config.kv_cache_memory_bytes,
        "prefix_caching": made.cache_config.enable_prefix_caching,
        "routing": made.aux_output_config.enable_return_routed_experts,
        "logprobs": made.model_config.logprobs_mode,
        "seed": made.model_config.seed,
        # Raises if it is more than there is.
        "memory": request_memory(memory, made.cache_config),
    }


def changed() -> list[str]:
    """Modules for a CPU that were imported to be changed, or that change others."""
    from torchtitan_rl.engines.vllm import worker  # it changes vLLM as it is imported

    worker.required.repack_experts(torch.nn.Module(), {"model.layers.0.mlp.experts.w1"})
    for_cpu = (
        *("vllm.v1.worker.cpu_worker", "torchtitan_rl.engines.vllm.cpu.norms"),
        *("vllm.distributed.device_communicators.cpu_communicator",),
    )
    return [name for name in for_cpu if name in sys.modules]


def main(folder: Path) -> None:
    platforms._current_platform = PretendedGpus()
    vllm_config.HAS_TRITON = True
    gpu = Gpu("a GPU", (8, 0), TOTAL, FREE)
    build.read_driver = lambda: Driver("580.82.07", (13, 0), (gpu,) * 8)
    found: dict[str, Any] = {}
    for capability in CAPABILITIES:
        PretendedGpus.capability = capability
        with pretend_gpus(capability):
            found[str(capability)] = {name: decided(name, folder) for name in built_in_recipes()}
            found["changed"] = changed()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
