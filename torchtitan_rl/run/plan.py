"""A plan: what a run takes of a machine, from its actors traced, before any process is started."""

import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_rl.config import RunConfig
from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.core.plugins import nearest
from torchtitan_rl.models.hf import atomic_folder, read_hf_config
from torchtitan_rl.models.makers.tiny import write_tiny_model
from torchtitan_rl.models.shapes import SHAPES
from torchtitan_rl.models.trace import Collective
from torchtitan_rl.platform import DeviceType, assume_device, resolve_dtype
from torchtitan_rl.run.checks import check_shape
from torchtitan_rl.run.machine import Machine
from torchtitan_rl.run.starting_model import model_folder
from torchtitan_rl.run.traced import (
    GeneratorTrace,
    Lengths,
    TrainerTrace,
    trace_generator,
    trace_trainer,
)

GIB = 2**30
CUDA_GIB = 2.5
"""Memory of each GPU that is nobody's tensor: CUDA's context, NCCL's buffers, workspaces, and what
the allocator cannot use. An engine's CUDA graphs are in it, too."""
CPU_GIB = {"trainer": 0.45, "generator": 0.55}
"""Memory of each process on a CPU that is nobody's tensor: what it imports, and what the allocator
keeps, as `benchmarks/plan.py` measured it."""
OVERLAPPED = ("_allgather_base_", "_reduce_scatter_base_")
"""Collectives of FSDP, which run beside the computation; it waits for all others."""
HOST_GBS = 10.0
"""10⁹ bytes a second at which one process copies in the memory of its host."""


class PlanError(TorchtitanRLError, ValueError):
    """A run cannot be planned; the message says what is missing."""


@dataclass(slots=True)
class Memory:
    """Memory of one process of an actor: one GPU's, or one process's share of this machine's."""

    actor: str
    processes: int
    bytes: dict[str, int]
    """By kind, at the moment at which they are most."""
    available: int
    """Bytes that there are; on a CPU all processes share them."""
    fits: bool = True
    fix: str = ""
    """What to change if it does not fit."""

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


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

    transport: str
    written: int
    """Bytes that the trainer's ranks write, together."""
    read: int
    """Bytes that the generators' workers read, together."""
    seconds: float | None
    """None: depends on a file system."""


@dataclass(slots=True)
class Plan:
    """What a run takes of a machine."""

    model: str
    parameters: int
    machine: Machine
    lengths: Lengths
    utilisation: float
    gpus_needed: int
    row_tokens: int
    """Tokens of a full microbatch."""
    microbatches: int
    """Microbatches of each rank in a step."""
    tokens: int
    """Tokens that the trainer computes in a step."""
    memory: list[Memory]
    snapshot_bytes: int
    """Host memory for the snapshots of all trainer ranks, two each."""
    kv_tokens: int
    """Tokens that the KV cache of a generator holds."""
    kv_sequences: int
    """Sequences of engine.max_model_len that it holds."""
    kv_expected: int
    """Sequences of the planned length that it holds."""
    sequences: int
    """Sequences that a generator decodes side by side."""
    stages: list[Stage]
    syncs: list[Sync]
    attention_share: float
    """Share of attention in the trainer's floating-point operations."""
    notes: list[str] = field(default_factory=list)
    traced_seconds: float = 0.0

    @property
    def fits(self) -> bool:
        return all(memory.fits for memory in self.memory)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON has it."""
        found = asdict(self)
        found["fits"] = self.fits
        for own, memory in zip(found["memory"], self.memory, strict=True):
            own["total"] = memory.total
        for own, stage in zip(found["stages"], self.stages, strict=True):
            own |= {"bound": stage.bound, "seconds": stage.seconds}
        return found


def make_plan(
    config: RunConfig,
    machine: Machine,
    *,
    hf_config: str = "",
    prompt_tokens: int = 0,
    completion_tokens: int = 0,
    utilisation: float = 0.4,
) -> Plan:
    """Trace the actors of a run, and compare what they take with what the machine has."""
    started = time.perf_counter()
    lengths = planned_lengths(config, prompt_tokens, completion_tokens)
    device: DeviceType = "cpu" if machine.is_cpu else "cuda"
    with tempfile.TemporaryDirectory() as temporary:
        folder = shape_folder(config, hf_config, Path(temporary))
        hf = read_hf_config(folder)
        check_shape(config, hf)
        trainer = trace_trainer(config, folder, lengths, device=device)
        generator = trace_generator(config, folder, lengths, device=device)
        with assume_device(device):
            dtype = resolve_dtype(config.generator.engine.dtype)
    plan = _assemble(
        config,
        machine,
        lengths,
        trainer,
        generator,
        utilisation,
        element=4 if dtype == "float32" else 2,
        kv_heads=hf["num_key_value_heads"],
    )
    plan.traced_seconds = time.perf_counter() - started
    return plan


def planned_lengths(config: RunConfig, prompt_tokens: int, completion_tokens: int) -> Lengths:
    """Tokens of prompts and completions: those given, else all that a completion may have, and
    prompts of 128 tokens, or as many as there is room for."""
    longest = config.generator.engine.max_model_len
    completion = completion_tokens or min(config.generator.sampling.max_tokens, longest - 1)
    prompt = prompt_tokens or max(1, min(128, longest - completion))
    if prompt + completion > longest:
        raise PlanError(
            f"--prompt_tokens {prompt} and --completion_tokens {completion} are more than "
            f"generator.engine.max_model_len ({longest}): lower them, or raise that"
        )
    return Lengths(prompt, completion)


def shape_folder(config: RunConfig, hf_config: str, temporary: Path) -> str:
    """A folder with the config.json of the run's model: its own, one that was given, that of a
    well-known model, or what a warm start will make."""
    if hf_config:
        if not Path(hf_config).is_file():
            raise PlanError(f"--hf_config {hf_config}: there is no such file")
        return write_shape(json.loads(Path(hf_config).read_text()), temporary, "given")
    folder = model_folder(config)
    if (folder / "config.json").is_file():
        return str(folder)
    if not config.model and config.warm_start:
        experts = config.warm_start.experts
        path = temporary / "tiny"
        return str(write_tiny_model(path, seed=0, weights=False, experts=experts))
    if folder.name in SHAPES:
        return write_shape(SHAPES[folder.name], temporary, folder.name)
    raise PlanError(
        f"there is no {folder}/config.json, and {folder.name!r} is no model whose shape is known; "
        f"{nearest(folder.name, SHAPES)}. Give --hf_config path/to/config.json"
    )


def write_shape(shape: dict[str, Any], temporary: Path, name: str) -> str:
    """Write a folder with a config.json and nothing else; returns its path."""
    with atomic_folder(temporary / name) as folder:
        (folder / "config.json").write_text(json.dumps(shape))
    return str(temporary / name)


def _assemble(
    config: RunConfig,
    machine: Machine,
    lengths: Lengths,
    trainer: TrainerTrace,
    generator: GeneratorTrace,
    utilisation: float,
    *,
    element: int,
    kv_heads: int,
) -> Plan:
    kv_tokens = int(config.generator.engine.kv_cache_gib * GIB) // generator.kv_bytes_per_token
    longest = config.generator.engine.max_model_len
    expected = max(1, kv_tokens // lengths.total)
    sequences = min(generator.sequences, expected)
    world = config.trainer.parallelism.world_size
    plan = Plan(
        model=config.model or "made by the warm start",
        parameters=trainer.parameters,
        machine=machine,
        lengths=lengths,
        utilisation=utilisation,
        gpus_needed=len({gpu for own in config.gpus for gpu in own}),
        row_tokens=trainer.row_tokens,
        microbatches=trainer.microbatches * trainer.updates,
        tokens=round(trainer.tokens * trainer.updates * config.trainer.parallelism.dp_degree),
        memory=list(_memory(config, machine, trainer, generator)),
        snapshot_bytes=2 * trainer.published * element * world,
        kv_tokens=kv_tokens,
        kv_sequences=kv_tokens // longest,
        kv_expected=expected,
        sequences=sequences,
        stages=[
            _generate(config, machine, lengths, generator, sequences, utilisation),
            _train(machine, trainer, utilisation),
        ],
        syncs=list(_syncs(config, machine, trainer, element)),
        attention_share=trainer.attention_flops / trainer.flops,
    )
    _say_whether_it_fits(config, plan, trainer, kv_heads)
    plan.notes += _notes(config, plan)
    return plan


# ---- memory -------------------------------------------------------------------------------------


def _memory(
    config: RunConfig, machine: Machine, trainer: TrainerTrace, generator: GeneratorTrace
) -> Iterator[Memory]:
    available = int(machine.gpu.memory_gib * GIB)
    engine, cpu = config.generator.engine, machine.is_cpu

    def besides(actor: str) -> int:
        # Of actors that take turns on a GPU, the one that sleeps keeps this.
        return int((CPU_GIB[actor] if cpu else CUDA_GIB * (1 + config.colocated)) * GIB)

    yield Memory(
        "trainer",
        config.trainer.parallelism.world_size,
        {**{k: v for k, v in trainer.peak.items() if v}, "besides": besides("trainer")},
        available,
    )
    # On a CPU vLLM multiplies by packed copies of its matrices. The output layer's own stays, since
    # the embedding may be the same.
    packed = {"packed": generator.head} if cpu else {}
    yield Memory(
        "generator",
        config.generator.replicas * config.generator.tensor_parallel_degree,
        {
            "weights": generator.weights,
            **packed,
            "KV cache": int(engine.kv_cache_gib * GIB),
            "activations": generator.activations,
            "besides": besides("generator"),
        },
        available,
    )


def _say_whether_it_fits(
    config: RunConfig, plan: Plan, trainer: TrainerTrace, kv_heads: int
) -> None:
    """Decide it for each actor, and name the setting to change."""
    if plan.machine.is_cpu:
        taken = sum(m.total * m.processes for m in plan.memory) + plan.snapshot_bytes
        for memory in plan.memory:
            memory.fits = taken <= memory.available
            over = taken - memory.available
            memory.fix = "" if memory.fits else _fix(config, memory, trainer, over, kv_heads)
        return
    for memory in plan.memory:
        over = memory.total - memory.available
        memory.fits = over <= 0
        memory.fix = "" if memory.fits else _fix(config, memory, trainer, over, kv_heads)


def _fix(config: RunConfig, memory: Memory, trainer: TrainerTrace, over: int, kv_heads: int) -> str:
    """The setting that makes an actor fit which takes `over` bytes too many."""
    engine, settings = config.generator.engine, config.trainer
    if memory.actor == "generator":
        room = int(engine.kv_cache_gib * GIB) - over
        if room > memory.bytes["KV cache"] / 4:
            return f"--generator.engine.kv_cache_gib {math.floor(room / GIB * 10) / 10:g}"
        degree = 2 * config.generator.tensor_parallel_degree
        if kv_heads % degree:
            return "it needs GPUs with more memory: its heads cannot be divided further"
        return f"--generator.tensor_parallel_degree {degree}"
    activations = memory.bytes.get("activations", 0)
    in_passes = trainer.peak == trainer.passes
    if settings.activation_checkpoint != "full" and activations > over and in_passes:
        return "--trainer.activation_checkpoint full"
    share = (activations - over) / activations if activations and in_passes else 0.0
    fewer = int(settings.tokens_per_microbatch * share * 0.95)
    if fewer >= engine.max_model_len:
        return f"--trainer.tokens_per_microbatch {fewer}"
    sharded = sum(trainer.kept.values())
    rest = max(memory.total - sharded, 0)
    if rest >= memory.available:
        return "--trainer.tokens_per_microbatch lower, or a GPU with more memory"
    degree = settings.parallelism.data_parallel_shard_degree
    needed = degree * sharded / (memory.available - rest)
    more = 2 ** math.ceil(math.log2(max(needed, degree + 1)))
    return f"--trainer.parallelism.data_parallel_shard_degree {more}"


# ---- time ---------------------------------------------------------------------------------------


def _train(machine: Machine, trainer: TrainerTrace, utilisation: float) -> Stage:
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


def _wire_seconds(machine: Machine, collective: Collective, *, first: int = 0) -> float:
    away = machine.spans_nodes(collective.ranks, first=first)
    rate = machine.gpu.network_gbs if away else machine.gpu.link_gbs
    return collective.wire_bytes / (rate * 1e9)


def _generate(
    config: RunConfig,
    machine: Machine,
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


def _syncs(
    config: RunConfig, machine: Machine, trainer: TrainerTrace, element: int
) -> Iterator[Sync]:
    """Bytes of a sync of all weights by each transport."""
    whole = trainer.parameters * element
    share = trainer.published * element
    degree, replicas = config.generator.tensor_parallel_degree, config.generator.replicas
    workers, gpu = degree * replicas, machine.gpu
    to_host, from_host = share / (gpu.pcie_gbs * 1e9), whole / degree / (gpu.pcie_gbs * 1e9)
    yield Sync("shm", whole, whole * workers, to_host + whole / (HOST_GBS * 1e9) + from_host)
    yield Sync("file", whole, whole * workers, None)
    network = whole * workers / (min(machine.per_node, workers) * gpu.network_gbs * 1e9)
    yield Sync("rdma", whole, whole * workers, to_host + network + from_host)
    # Each worker receives its slice only, from the GPUs that have it.
    far = config.trainer.parallelism.world_size + workers > machine.per_node
    rate = gpu.network_gbs if far else gpu.link_gbs
    yield Sync("collective", whole * replicas, whole * replicas, whole / degree / (rate * 1e9))


def _notes(config: RunConfig, plan: Plan) -> Iterator[str]:
    machine, spare = plan.machine, plan.machine.count - plan.gpus_needed
    if machine.is_cpu:
        return
    if spare < 0:
        yield (
            f"the actors' parallelism needs {plan.gpus_needed} GPUs, and there are "
            f"{machine.count}: lower trainer.parallelism, generator.replicas or "
            "generator.tensor_parallel_degree"
        )
    elif spare:
        yield (
            f"{spare} of {machine.count} GPUs have nothing to do: raise "
            "trainer.parallelism.data_parallel_shard_degree or generator.replicas"
        )
    if plan.sequences < min(config.generator.engine.max_num_seqs, plan.kv_expected):
        yield f"a step has only {plan.sequences} sequences for each generator"
    elif plan.kv_expected < config.generator.engine.max_num_seqs:
        yield (
            f"the KV cache holds {plan.kv_expected} sequences of {plan.lengths.total} tokens, and "
            f"generator.engine.max_num_seqs is {config.generator.engine.max_num_seqs}: raise "
            "generator.engine.kv_cache_gib if there is room"
        )
