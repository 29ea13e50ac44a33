"""A trainer and an engine that keep torch's own profile of their memory and count their operations.
In a module of its own: an actor's class must be importable in the worker.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.flop_counter import FlopCounterMode

from torchtitan_rl.actors.trainer import Trainer, computes


class MemoryProfile:
    """Allocations of one thread, by torch's profiler. Start it before what is to be counted is
    allocated."""

    def __init__(self) -> None:
        cpu = torch.profiler.ProfilerActivity.CPU
        self._profile = torch.profiler.profile(activities=[cpu], profile_memory=True)
        self._started = time.time_ns()
        self._profile.start()

    def stop(self, since: int = 0) -> dict[str, int]:
        """End the profile. The most bytes since a time in nanoseconds, and those at the end."""
        self._profile.stop()
        changes = sorted(self._changes())
        held = np.cumsum([nbytes for _, nbytes in changes])
        late = np.array([at >= since for at, _ in changes])
        return {"peak": int(held[late].max()), "end": int(held[-1])}

    def _changes(self) -> Iterator[tuple[int, int]]:
        for event in self._profile.profiler.kineto_results.events():
            if event.name() == "[memory]" and event.device_type().name == "CPU":
                yield event.start_ns(), event.nbytes()


def resident() -> int:
    """Bytes of this process's own pages."""
    return psutil.Process().memory_full_info().uss


class ProfiledTrainer(Trainer):
    """The trainer; its profile begins before the model is built. Without `profiling` it only says
    how much memory the process has: a profile takes gigabytes itself."""

    def __init__(self, *args: Any, profiling: float = 1.0, **options: Any) -> None:
        super().__init__(*args, **options)
        self._imported = resident()
        self._memory = self._thread.submit(MemoryProfile).result() if profiling else None
        self._found: dict[str, int] = {}
        self._since = 0
        self._counts = False
        self.flops = 0

    def update(self, grid: Any) -> Any:
        if not self._counts:
            return super().update(grid)
        from torchtitan_rl.models.trace import EXTRA_FORMULAS

        counter = FlopCounterMode(display=False, custom_mapping=EXTRA_FORMULAS)
        with counter:
            found = super().update(grid)
        self.flops += counter.get_total_flops()
        return found

    @computes
    def begin(self) -> None:
        """From now on the peak counts: the optimizer has its states."""
        self._since = time.time_ns()

    @computes
    def count(self) -> None:
        """Count the operations of the steps that follow, and profile memory no longer."""
        if self._memory:
            self._found = self._memory.stop(self._since)
            self._counts = True
        self._found |= {"imported": self._imported, "resident": resident()}

    @computes
    def found(self) -> dict[str, int]:
        return {**self._found, "flops": self.flops}


def profile_engine(task: dict[str, Any]) -> dict[str, int]:
    """Build the engine, have it load weights as at the start of a run, and generate; in a process
    of its own. Packed matrices are oneDNN's memory and not torch's: they are added up apart."""
    import asyncio

    from safetensors.torch import load_file

    from torchtitan_rl.config import EngineConfig, SamplingConfig
    from torchtitan_rl.engines.vllm import engine as engine_module
    from torchtitan_rl.platform import release_freed_memory
    from torchtitan_rl.weight_sync.handle import whole_tensors
    from torchtitan_rl.weight_sync.transport import make_publisher

    profiles: list[MemoryProfile] = []
    build = engine_module.build_llm_engine
    imported = resident()

    def profiled(*args: Any, **options: Any) -> Any:
        if task["profiling"]:
            profiles.append(MemoryProfile())
        return build(*args, **options)

    engine_module.build_llm_engine = profiled
    engine = engine_module.Engine(task["model"], EngineConfig(**task["engine"]), seed=0)

    async def pull() -> None:
        """Load the model's own weights, as at the start of a run; keep nothing of them here."""
        weights = load_file(str(next(Path(task["model"]).glob("*.safetensors"))))
        named = [(name, tensor.float()) for name, tensor in weights.items()]
        publisher = make_publisher("shm")
        await engine.pull_weights(publisher.publish(whole_tensors(named), version=1))
        publisher.close()

    sampling = SamplingConfig(n=task["n"], max_tokens=task["max_tokens"])
    prompts = [
        [(7 * i + k) % 250 + 1 for k in range(task["prompt"])] for i in range(task["prompts"])
    ]

    async def work() -> int:
        await pull()
        release_freed_memory()
        since = time.time_ns()
        await engine.generate(prompts, sampling, [f"g/{i}" for i in range(len(prompts))])
        return since

    since = asyncio.run(work())
    found = {}
    if profiles:
        found = engine._submit(lambda: profiles[0].stop(since)).result()
    runner = engine._engine.engine_core.engine_core.model_executor.driver_worker.model_runner
    found |= {"imported": imported, "resident": resident(), "packed": packed_bytes(runner.model)}
    engine.close()
    return found


def packed_bytes(model: torch.nn.Module) -> int:
    """Bytes of the matrices that vLLM has packed by oneDNN."""
    from vllm import _custom_ops as ops

    total = 0
    for module in model.modules():
        multiply = getattr(module, "cpu_linear", None)
        for cell in getattr(multiply, "__closure__", None) or ():
            if isinstance(cell.cell_contents, ops.CPUDNNLGEMMHandler):
                total += 4 * cell.cell_contents.n * cell.cell_contents.k
    return total


if __name__ == "__main__":
    print("FOUND", json.dumps(profile_engine(json.loads(sys.argv[1]))))
