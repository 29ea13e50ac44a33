"""A plan: what a run takes of a machine, from its actors traced, before any process is started."""

import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_rl.config import RunConfig
from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.core.plugins import nearest
from torchtitan_rl.models.archs.registry import SHAPES
from torchtitan_rl.models.hf import atomic_folder, read_hf_config
from torchtitan_rl.models.makers.tiny import write_tiny_model
from torchtitan_rl.models.trace import Kind
from torchtitan_rl.platform import DeviceType, assume_device, resolve_dtype, too_few_gpus
from torchtitan_rl.run.checks import check_shape
from torchtitan_rl.run.machine import PlannedMachine
from torchtitan_rl.run.plan_time import (
    Stage,
    Sync,
    generate_stage,
    planned_transport,
    syncs,
    train_stage,
)
from torchtitan_rl.run.starting_model import model_folder
from torchtitan_rl.run.traced import (
    Lengths,
    Traces,
    trace_generator,
    trace_reference,
    trace_trainer,
)
from torchtitan_rl.weight_sync.handle import Transport

GIB = 2**30
CUDA_GIB = 2.5
"""Memory of a GPU that each process takes beside its tensors: CUDA's context, NCCL's buffers,
workspaces, an engine's CUDA graphs, and what the allocator cannot use."""
CPU_GIB = {"trainer": 0.45, "generator": 0.55, "reference": 0.45}
"""Memory that each process on a CPU takes beside its tensors: what it imports, and what the
allocator keeps, as `benchmarks/plan.py` measured it of the first two."""


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
            generate_stage(config, machine, lengths, generator, sequences, utilisation),
            train_stage(machine, trainer, utilisation),
        ],
        syncs=list(syncs(config, machine, traces)),
        attention_share=trainer.attention_flops / trainer.flops,
        traced_seconds=traces.seconds,
    )
    _say_whether_it_fits(config, plan, traces)
    plan.notes += _notes(config, plan)
    return plan


# ---- memory -------------------------------------------------------------------------------------


def _memory(
    config: RunConfig, machine: PlannedMachine, traces: Traces, transport: Transport
) -> Iterator[Memory]:
    """Memory of a process of each actor, by kind."""
    engine, cpu = config.generator.engine, machine.is_cpu
    trainer, generator, reference = traces.trainer, traces.generator, traces.reference
    sharing = 1 + (config.colocated and not cpu) * (1 + config.has_reference)
    # It stays on the GPU in everybody's turn.
    others = {"reference": reference["weights"]} if reference and sharing > 1 else {}
    # Both snapshots of these transports lie where the weights are.
    near = transport in ("collective", "rdma")

    def process(actor: str, processes: int, kinds: Mapping[Any, int]) -> Memory:
        # Of actors that share a GPU, those that sleep keep this.
        besides = int((CPU_GIB[actor] if cpu else CUDA_GIB * sharing) * GIB)
        taken = {kind: nbytes for kind, nbytes in kinds.items() if nbytes}
        available = int(machine.gpu.memory_gib * GIB)
        return Memory(actor, processes, taken | {"besides": besides}, available)

    yield process(
        "trainer",
        config.trainer.parallelism.world_size,
        {
            **trainer.peak,
            "snapshots": 2 * trainer.published * traces.element if near else 0,
            **others,
        },
    )
    yield process(
        "generator",
        config.generator.replicas * config.generator.tensor_parallel_degree,
        {
            "weights": generator.weights,
            # On a CPU vLLM multiplies by packed copies of its matrices. The output layer's own
            # stays, since the embedding may be the same.
            "packed": generator.head if cpu else 0,
            "received": generator.weights if transport == "collective" else 0,
            "KV cache": int(engine.kv_cache_gib * GIB),
            "activations": generator.activations,
            **others,
        },
    )
    if reference:
        yield process("reference", config.trainer.reference.parallelism.world_size, reference)


def _host_bytes(
    config: RunConfig, machine: PlannedMachine, traces: Traces, transport: Transport
) -> dict[str, int]:
    """What of the weights is in the memory of hosts, beside the processes' own."""
    found, trainer = {}, traces.trainer
    if transport in ("shm", "relay", "file"):
        found["snapshots"] = 2 * trainer.parameters * traces.element
    if transport == "relay":  # the two copies of each host with generators
        hosts = len(machine.hosts(config.gpus[1]))
        found["received"] = 2 * hosts * trainer.parameters * traces.element
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
