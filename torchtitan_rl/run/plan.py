"""A plan: what a run takes of a machine, from its actors traced, before any process is started."""

import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from torchtitan_rl.config import RunConfig, WeightSyncConfig
from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.core.plugins import nearest
from torchtitan_rl.models.archs.registry import SHAPES
from torchtitan_rl.models.hf import atomic_folder, read_hf_config
from torchtitan_rl.models.makers.tiny import write_tiny_model
from torchtitan_rl.models.trace import Collective, Kind
from torchtitan_rl.platform import DeviceType, assume_device, resolve_dtype, too_few_gpus
from torchtitan_rl.run.checks import check_shape
from torchtitan_rl.run.machine import PlannedMachine
from torchtitan_rl.run.starting_model import model_folder
from torchtitan_rl.run.traced import (
    GeneratorTrace,
    Lengths,
    TrainerTrace,
    trace_generator,
    trace_reference,
    trace_trainer,
)
from torchtitan_rl.weight_sync.handle import Transport
from torchtitan_rl.weight_sync.transport import Ends, choose_transport

GIB = 2**30
CUDA_GIB = 2.5
"""Memory of a GPU that each process takes beside its tensors: CUDA's context, NCCL's buffers,
workspaces, an engine's CUDA graphs, and what the allocator cannot use."""
CPU_GIB = {"trainer": 0.45, "generator": 0.55, "reference": 0.45}
"""Memory that each process on a CPU takes beside its tensors: what it imports, and what the
allocator keeps, as `benchmarks/plan.py` measured it of the first two."""
OVERLAPPED = ("_allgather_base_", "_reduce_scatter_base_")
"""Collectives of FSDP, which run beside the computation; it waits for all others."""
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
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

    transport: Transport
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
    machine: PlannedMachine
    lengths: Lengths
    utilisation: float
    gpus_needed: int
    fix: str
    """What to change if there are too few GPUs."""
    transport: Transport
    """What carries the weights: the setting, or what `auto` chooses for these GPUs."""
    row_tokens: int
    """Tokens of a full microbatch."""
    microbatches: int
    """Microbatches of each rank in a step."""
    tokens: int
    """Tokens that the trainer computes in a step."""
    memory: list[Memory]
    host_bytes: dict[str, int]
    """Host memory by kind, of all processes together, if their tensors are on GPUs."""
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
        """Whether there are enough GPUs, and enough memory in each."""
        return not self.fix and all(memory.fits for memory in self.memory)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON has it."""
        found = asdict(self)
        found["fits"] = self.fits
        for own, memory in zip(found["memory"], self.memory, strict=True):
            own["total"] = memory.total
        for own, stage in zip(found["stages"], self.stages, strict=True):
            own |= {"bound": stage.bound, "seconds": stage.seconds}
        return found


@dataclass(slots=True)
class Traces:
    """The actors of a run traced, for any number of plans of it."""

    lengths: Lengths
    trainer: TrainerTrace
    generator: GeneratorTrace
    reference: dict[Kind, int]
    """Bytes by kind; empty: the run has no reference."""
    element: int
    """Bytes of a published value."""
    kv_heads: int
    seconds: float
    """How long it took to trace them."""


def make_plan(
    config: RunConfig,
    machine: PlannedMachine,
    *,
    hf_config: str = "",
    prompt_tokens: int = 0,
    completion_tokens: int = 0,
    utilisation: float = 0.4,
) -> Plan:
    """Trace the actors of a run, and compare what they take with what the machine has."""
    traces = trace_actors(
        config,
        "cpu" if machine.is_cpu else "cuda",
        hf_config=hf_config,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
    )
    return compare(config, machine, traces, utilisation=utilisation)


def trace_actors(
    config: RunConfig,
    device: DeviceType,
    *,
    hf_config: str = "",
    prompt_tokens: int = 0,
    completion_tokens: int = 0,
) -> Traces:
    """Trace a rank of each actor that computes."""
    started = time.perf_counter()
    lengths = planned_lengths(config, prompt_tokens, completion_tokens)
    with tempfile.TemporaryDirectory() as temporary:
        folder = shape_folder(config, hf_config, Path(temporary))
        hf = read_hf_config(folder)
        check_shape(config, hf)
        trainer = trace_trainer(config, folder, lengths, device=device)
        generator = trace_generator(config, folder, lengths, device=device)
        reference: dict[Kind, int] = {}
        if config.has_reference:
            reference = trace_reference(config, folder, lengths, device=device)
        with assume_device(device):
            dtype = resolve_dtype(config.generator.engine.dtype)
    return Traces(
        lengths,
        trainer,
        generator,
        reference,
        element=4 if dtype == "float32" else 2,
        kv_heads=hf["num_key_value_heads"],
        seconds=time.perf_counter() - started,
    )


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


def compare(
    config: RunConfig, machine: PlannedMachine, traces: Traces, *, utilisation: float = 0.4
) -> Plan:
    """What a run takes, compared with what a machine has."""
    trainer, generator, lengths = traces.trainer, traces.generator, traces.lengths
    kv_tokens = int(config.generator.engine.kv_cache_gib * GIB) // generator.kv_bytes_per_token
    longest = config.generator.engine.max_model_len
    expected = max(1, kv_tokens // lengths.total)
    sequences = min(generator.sequences, expected)
    transport = planned_transport(config, machine)
    plan = Plan(
        model=config.model or "made by the warm start",
        parameters=trainer.parameters,
        machine=machine,
        lengths=lengths,
        utilisation=utilisation,
        gpus_needed=config.gpus_needed,
        fix=_more_gpus(config, machine),
        transport=transport,
        row_tokens=trainer.row_tokens,
        microbatches=trainer.microbatches * trainer.updates,
        tokens=round(trainer.tokens * trainer.updates * config.trainer.parallelism.dp_degree),
        memory=list(_memory(config, machine, traces, transport)),
        host_bytes=_host_bytes(config, machine, traces, transport),
        kv_tokens=kv_tokens,
        kv_sequences=kv_tokens // longest,
        kv_expected=expected,
        sequences=sequences,
        stages=[
            _generate(config, machine, lengths, generator, sequences, utilisation),
            _train(machine, trainer, utilisation),
        ],
        syncs=list(_syncs(config, machine, traces)),
        attention_share=trainer.attention_flops / trainer.flops,
        traced_seconds=traces.seconds,
    )
    _say_whether_it_fits(config, plan, traces)
    plan.notes += _notes(config, plan)
    return plan


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


# ---- memory -------------------------------------------------------------------------------------


def _memory(
    config: RunConfig, machine: PlannedMachine, traces: Traces, transport: Transport
) -> Iterator[Memory]:
    available = int(machine.gpu.memory_gib * GIB)
    engine, cpu = config.generator.engine, machine.is_cpu
    trainer, generator, reference = traces.trainer, traces.generator, traces.reference
    sharing = 1 + (config.colocated and not cpu) * (1 + config.has_reference)
    others = {}
    if reference and sharing > 1:
        others = {"reference": reference["weights"]}  # they stay on the GPU in everybody's turn

    def besides(actor: str) -> int:
        # Of actors that share a GPU, those that sleep keep this.
        return int((CPU_GIB[actor] if cpu else CUDA_GIB * sharing) * GIB)

    # Both snapshots of these transports lie where the weights are.
    near = transport in ("collective", "rdma")
    snapshots = {"snapshots": 2 * trainer.published * traces.element} if near else {}
    yield Memory(
        "trainer",
        config.trainer.parallelism.world_size,
        {k: v for k, v in trainer.peak.items() if v}
        | snapshots
        | others
        | {"besides": besides("trainer")},
        available,
    )
    # On a CPU vLLM multiplies by packed copies of its matrices. The output layer's own stays, since
    # the embedding may be the same.
    packed = {"packed": generator.head} if cpu else {}
    received = {"received": generator.weights} if transport == "collective" else {}
    yield Memory(
        "generator",
        config.generator.replicas * config.generator.tensor_parallel_degree,
        {
            "weights": generator.weights,
            **packed,
            **received,
            "KV cache": int(engine.kv_cache_gib * GIB),
            "activations": generator.activations,
            **others,
            "besides": besides("generator"),
        },
        available,
    )
    if reference:
        yield Memory(
            "reference",
            config.trainer.reference.parallelism.world_size,
            {k: v for k, v in reference.items() if v} | {"besides": besides("reference")},
            available,
        )


def _host_bytes(
    config: RunConfig, machine: PlannedMachine, traces: Traces, transport: Transport
) -> dict[str, int]:
    """What of the weights is in the memory of hosts, beside the processes' own."""
    found, trainer = {}, traces.trainer
    if transport in ("shm", "file"):
        found["snapshots"] = 2 * trainer.parameters * traces.element
    if transport == "rdma":  # each generator has a copy that its ranks read
        found["received"] = config.generator.replicas * trainer.parameters * traces.element
    if config.colocated and not machine.is_cpu:
        own = trainer.kept["weights"] + trainer.kept["optimizer"]
        found["offloaded"] = own * config.trainer.parallelism.world_size
    return found


def _say_whether_it_fits(config: RunConfig, plan: Plan, traces: Traces) -> None:
    """Decide it for each actor, and name the setting to change."""
    taken = sum(m.total * m.processes for m in plan.memory) + sum(plan.host_bytes.values())
    for memory in plan.memory:
        # The processes on a CPU share its memory.
        over = (taken if plan.machine.is_cpu else memory.total) - memory.available
        memory.fits = over <= 0
        memory.fix = "" if memory.fits else _fix(config, plan, memory, traces, over)


def _more_gpus(config: RunConfig, machine: PlannedMachine) -> str:
    """What to change if the actors need more GPUs than there are; empty if they do not."""
    needed = config.gpus_needed
    if machine.is_cpu or needed <= machine.count:
        return ""
    return too_few_gpus(needed, machine.count, can_share=config.could_share_gpus)


def _fix(config: RunConfig, plan: Plan, memory: Memory, traces: Traces, over: int) -> str:
    """The setting that makes an actor fit which takes `over` bytes too many."""
    engine, settings, trainer = config.generator.engine, config.trainer, traces.trainer
    by_host = "file" if len(plan.machine.hosts(range(plan.gpus_needed))) > 1 else "shm"
    elsewhere = f"--trainer.weight_sync.transport {by_host}"
    if memory.actor == "reference":
        degree = 2 * settings.reference.parallelism.data_parallel_shard_degree
        return f"--trainer.reference.parallelism.data_parallel_shard_degree {degree}"
    if memory.actor == "generator":
        room = int(engine.kv_cache_gib * GIB) - over
        if room > memory.bytes["KV cache"] / 4:
            return f"--generator.engine.kv_cache_gib {math.floor(room / GIB * 10) / 10:g}"
        if memory.bytes.get("received", 0) >= over:
            return elsewhere
        degree = 2 * config.generator.tensor_parallel_degree
        if traces.kv_heads % degree:
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
    snapshots = memory.bytes.get("snapshots", 0)
    if snapshots >= over:
        return elsewhere
    sharded = sum(trainer.kept.values()) + snapshots
    rest = max(memory.total - sharded, 0)
    if rest >= memory.available:
        return "--trainer.tokens_per_microbatch lower, or a GPU with more memory"
    degree = settings.parallelism.data_parallel_shard_degree
    needed = degree * sharded / (memory.available - rest)
    more = 2 ** math.ceil(math.log2(max(needed, degree + 1)))
    return f"--trainer.parallelism.data_parallel_shard_degree {more}"


# ---- time ---------------------------------------------------------------------------------------


def _train(machine: PlannedMachine, trainer: TrainerTrace, utilisation: float) -> Stage:
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


def _generate(
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


def _syncs(config: RunConfig, machine: PlannedMachine, traces: Traces) -> Iterator[Sync]:
    """Bytes of a sync of all weights by each transport that the run could use."""
    for transport in TRANSPORTS:
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
    network = whole * workers / (min(machine.per_host, workers) * gpu.network_gbs * 1e9)
    return Sync(transport, whole, whole * workers, to_host + network + from_host)


def _notes(config: RunConfig, plan: Plan) -> Iterator[str]:
    machine, spare = plan.machine, plan.machine.count - plan.gpus_needed
    if machine.is_cpu:
        return
    if spare > 0:
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
