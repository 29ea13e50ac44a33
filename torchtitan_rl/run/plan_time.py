"""How long a planned step takes on a machine, and a sync of the weights by each transport."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

from torchtitan_rl.config import RunConfig, WeightSyncConfig
from torchtitan_rl.models.trace import Collective
from torchtitan_rl.run.machine import PlannedMachine
from torchtitan_rl.run.traced import GeneratorTrace, Lengths, Traces, TrainerTrace
from torchtitan_rl.weight_sync.handle import Transport
from torchtitan_rl.weight_sync.transport import Ends, choose_transport

OVERLAPPED = ("_allgather_base_", "_reduce_scatter_base_")
"""Collectives of FSDP, which run beside the computation; it waits for all others."""
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
RELAY_GBS = 3.0
"""10⁹ bytes a second that a host hands on to the next by TCP; assumed."""
HOST_GBS = 10.0
"""10⁹ bytes a second at which one process copies in the memory of its host."""


@dataclass(slots=True)
class Stage:
    """A stage of a step: what one GPU computes, reads and sends, and how long that takes."""

    name: str
    flops: float
    moved_bytes: float
    wire_bytes: float
    compute_seconds: float
    memory_seconds: float
    wire_seconds: float
    exposed_seconds: float = 0.0
    """The part of `wire_seconds` that nothing runs beside."""

    @property
    def bound(self) -> str:
        """What takes longest."""
        times = {
            "compute": self.compute_seconds,
            "memory": self.memory_seconds,
            "wire": self.wire_seconds,
        }
        return max(times, key=lambda name: times[name])

    @property
    def seconds(self) -> float:
        overlapped = self.wire_seconds - self.exposed_seconds
        beside = max(self.compute_seconds, self.memory_seconds, overlapped)
        return beside + self.exposed_seconds


@dataclass(slots=True)
class Sync:
    """One sync of the weights by a transport."""

    transport: Transport
    written: int
    """Bytes that the trainer's ranks write, together."""
    read: int
    """Bytes that the generators' workers read, together."""
    seconds: float | None
    """None: depends on a file system."""


def planned_transport(config: RunConfig, machine: PlannedMachine) -> Transport:
    """What would carry the weights between these GPUs; raises ValueError if the setting cannot."""
    trainer, generators, _ = config.gpus
    ends = Ends(
        hosts=frozenset(map(str, machine.hosts([*trainer, *generators]))),
        device="cpu" if machine.is_cpu else "cuda",
        trainer_ranks=len(trainer),
        tensor_parallel=config.generator.tensor_parallel_degree,
        shared_gpus=len({*trainer} & {*generators}),
    )
    return choose_transport(config.trainer.weight_sync, ends)[0]


def train_stage(machine: PlannedMachine, trainer: TrainerTrace, utilisation: float) -> Stage:
    """All updates of a step, on one GPU of the trainer."""
    gpu = machine.gpu
    calls = list(trainer.collectives())
    exposed = [call for call in calls if call[0].name not in OVERLAPPED]
    return Stage(
        "train",
        flops=trainer.flops,
        moved_bytes=trainer.moved_bytes,
        wire_bytes=sum(times * collective.wire_bytes for collective, times in calls),
        compute_seconds=trainer.flops / (gpu.tflops * 1e12 * utilisation),
        memory_seconds=trainer.moved_bytes / (gpu.memory_gbs * 1e9),
        wire_seconds=sum(times * _wire_seconds(machine, one) for one, times in calls),
        exposed_seconds=sum(times * _wire_seconds(machine, one) for one, times in exposed),
    )


def _wire_seconds(machine: PlannedMachine, collective: Collective, *, first: int = 0) -> float:
    away = machine.spans_hosts(collective.ranks, first=first)
    rate = machine.gpu.network_gbs if away else machine.gpu.link_gbs
    return collective.wire_bytes / (rate * 1e9)


def generate_stage(
    config: RunConfig,
    machine: PlannedMachine,
    lengths: Lengths,
    generator: GeneratorTrace,
    sequences: int,
    utilisation: float,
) -> Stage:
    """All samples of a step, on one GPU of each generator. The prompt of a group is prefilled once;
    every iteration reads the weights, and of each sequence its part of the KV cache."""
    gpu, replicas = machine.gpu, config.generator.replicas
    prompts = config.prompts_per_step / replicas
    samples = prompts * config.samples_per_prompt
    sampled = samples * lengths.completion
    seen = lengths.prompt + lengths.completion / 2  # by a sampled token, on average
    flops = prompts * (
        lengths.prompt * generator.token_flops + lengths.prompt**2 * generator.pair_flops
    ) + sampled * (generator.token_flops + generator.logit_flops + seen * generator.pair_flops)
    iterations = math.ceil(samples / sequences) * lengths.completion
    moved = iterations * generator.weights + sampled * seen * generator.kv_bytes_per_token
    tokens = prompts * lengths.prompt + sampled
    scale = tokens / generator.prefill_tokens
    first = config.trainer.parallelism.world_size
    wire = sum(_wire_seconds(machine, one, first=first) for one in generator.collectives)
    return Stage(
        "generate",
        flops=flops,
        moved_bytes=moved,
        wire_bytes=scale * sum(one.wire_bytes for one in generator.collectives),
        compute_seconds=flops / (gpu.tflops * 1e12 * utilisation),
        memory_seconds=moved / (gpu.memory_gbs * 1e9),
        wire_seconds=scale * wire,
        exposed_seconds=scale * wire,
    )


def syncs(config: RunConfig, machine: PlannedMachine, traces: Traces) -> Iterator[Sync]:
    """Bytes of a sync of all weights by each transport that the run could use."""
    trainer, generators, _ = config.gpus
    apart = len(machine.hosts([*trainer, *generators])) > 1
    for transport in TRANSPORTS:
        if transport == "relay" and not apart:  # there it is `shm`
            continue
        settings = WeightSyncConfig(transport=transport)
        try:
            planned_transport(
                replace(config, trainer=replace(config.trainer, weight_sync=settings)), machine
            )
        except ValueError:  # it cannot be used between these GPUs
            continue
        yield _sync(config, machine, traces, transport)


def _sync(config: RunConfig, machine: PlannedMachine, traces: Traces, transport: Transport) -> Sync:
    whole = traces.trainer.parameters * traces.element
    share = traces.trainer.published * traces.element
    degree, replicas = config.generator.tensor_parallel_degree, config.generator.replicas
    workers, gpu = degree * replicas, machine.gpu
    to_host, from_host = share / (gpu.pcie_gbs * 1e9), whole / degree / (gpu.pcie_gbs * 1e9)
    seconds: float | None
    if transport == "collective":
        # Each worker receives its slice only, from the GPUs that have it.
        seconds = whole / degree / (gpu.link_gbs * 1e9)
        return Sync(transport, whole * replicas, whole * replicas, seconds)
    if transport == "file":
        return Sync(transport, whole, whole * workers, None)
    if transport == "shm":
        seconds = to_host + whole / (HOST_GBS * 1e9) + from_host
        return Sync(transport, whole, whole * workers, seconds)
    if transport == "relay":
        network = whole / (min(RELAY_GBS, machine.per_host * gpu.network_gbs) * 1e9)
        return Sync(transport, whole, whole * workers, to_host + network + from_host)
    network = whole * workers / (min(machine.per_host, workers) * gpu.network_gbs * 1e9)
    return Sync(transport, whole, whole * workers, to_host + network + from_host)
