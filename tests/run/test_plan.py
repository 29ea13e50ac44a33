"""Plans: predicted against a real step, what is refused, and advice that makes a run fit."""

import functools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from torchtitan_rl.cli.plan import main
from torchtitan_rl.cli.train import read_overrides
from torchtitan_rl.config import Parallelism, RunConfig
from torchtitan_rl.models.archs.registry import SHAPES
from torchtitan_rl.models.makers.tiny import write_tiny_model
from torchtitan_rl.models.rank import ModelRank
from torchtitan_rl.models.trace import EXTRA_FORMULAS
from torchtitan_rl.platform import machine as facts
from torchtitan_rl.recipes import registry
from torchtitan_rl.run.machine import (
    GPUS,
    MachineError,
    PlannedGpu,
    PlannedMachine,
    parse_machine,
    this_machine,
)
from torchtitan_rl.run.plan import GIB, PlanError, Traces, compare, make_plan, trace_actors
from torchtitan_rl.run.traced import (
    Lengths,
    TracedTrainer,
    full_row,
    repeated,
    trace_trainer,
)

LENGTHS = Lengths(prompt=30, completion=20)


def recipe(name: str) -> RunConfig:
    return registry.build_recipe(name, registry.built_in_recipes())


@contextmanager
def real_trainer(config: RunConfig, folder: str, store: Path) -> Iterator[TracedTrainer]:
    """A trainer of one rank in this process, with real memory and random weights."""

    def join() -> torch.device:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), 1), rank=0, world_size=1)
        return torch.device("cpu")

    trainer = TracedTrainer.of(config, folder)
    try:
        trainer.build(ModelRank(folder, Parallelism(), dtype="float32", seed=0, join=join))
        yield trainer
    finally:
        dist.destroy_process_group()
        torch.autograd.set_multithreading_enabled(True)


def measured_peak(profile: torch.profiler.profile, *, after: int) -> int:
    """The most bytes that torch's allocator has given out after a time in nanoseconds."""
    held = most = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        if event.start_ns() >= after:
            most = max(most, held)
    return most


@pytest.mark.parametrize("experts", [0, 8])
def test_a_plan_is_what_a_real_step_takes(tmp_path, experts):
    """Memory within 10 % of torch's own profile, operations within 5 % of torch's own count."""
    folder = str(write_tiny_model(tmp_path / "tiny", seed=0, weights=False, experts=experts))
    config = replace(recipe("grpo_sum_digits_tiny"), prompts_per_step=16)
    predicted = trace_trainer(config, folder, LENGTHS, device="cpu")
    row = full_row(config, folder, LENGTHS)
    assert predicted.microbatches == 7
    assert row.tokens == config.trainer.tokens_per_microbatch
    cpu = torch.profiler.ProfilerActivity.CPU
    profile = torch.profiler.profile(activities=[cpu], profile_memory=True)
    profile.start()
    with real_trainer(config, folder, tmp_path / "store") as trainer:
        trainer.update(repeated(row, 1, 1))
        started = time.time_ns()
        trainer.update(repeated(row, 2, 1))
        profile.stop()
        peak = sum(predicted.peak.values())
        assert peak == pytest.approx(measured_peak(profile, after=started), rel=0.1)
        counter = FlopCounterMode(display=False, custom_mapping=EXTRA_FORMULAS)
        with counter:
            trainer.update(repeated(row, 2, 1))
    whole = counter.get_total_flops() / 2 * predicted.tokens / row.tokens
    assert predicted.flops == pytest.approx(whole, rel=0.05)
    assert 0 < predicted.attention_flops < predicted.flops


SMALL = SHAPES["Qwen3-0.6B"] | {"num_hidden_layers": 2, "vocab_size": 1024}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("small") / "config.json"
    file.write_text(json.dumps(SMALL))
    return str(file)


def changed(config: RunConfig, changes: str) -> RunConfig:
    return read_overrides(config, changes.split(), prog="plan")


@functools.cache
def traces_of(name: str, file: str = "", changes: str = "") -> Traces:
    """The actors of a recipe traced on a GPU."""
    return trace_actors(changed(recipe(name), changes), "cuda", hf_config=file)


QWEN = "grpo_sum_digits_qwen3_1_7b"


def gpus(gib: float = 80.0, count: int = 8, per_host: int = 8) -> PlannedMachine:
    return PlannedMachine("Mine", count, per_host, replace(GPUS["H100"], memory_gib=gib))


def test_a_plan_has_all_kinds_of_memory_and_what_bounds_a_step(small):
    plan = compare(recipe(QWEN), gpus(), traces_of(QWEN, small))
    trainer, generator = plan.memory
    assert plan.fits
    assert (plan.gpus_needed, trainer.processes, generator.processes) == (4, 2, 2)
    weights = 4 * plan.parameters / 2
    assert trainer.bytes["weights"] == pytest.approx(weights, rel=0.01)
    assert trainer.bytes["optimizer"] == pytest.approx(2 * weights, rel=0.01)
    assert {"gathered", "tables", "activations", "gradients"} <= trainer.bytes.keys()
    assert generator.bytes["weights"] == pytest.approx(2 * plan.parameters / 2, rel=0.01)
    # Two layers of keys and values, 4 of 8 heads, 128 numbers of 2 bytes.
    assert plan.kv_tokens == int(24 * GIB / (2 * 2 * 4 * 128 * 2))
    assert plan.kv_sequences == plan.kv_tokens // 1024
    by_name = {sync.transport: sync for sync in plan.syncs}
    assert by_name["shm"].written == 2 * plan.parameters
    assert by_name["shm"].read == 2 * 2 * plan.parameters
    assert by_name["collective"].read == 2 * plan.parameters
    for stage in plan.stages:
        assert stage.bound in ("compute", "memory", "wire")
        assert stage.seconds >= stage.compute_seconds > 0
    assert any("4 of 8 GPUs have nothing to do" in note for note in plan.notes)
    assert json.loads(json.dumps(plan.to_dict()))["fits"] is True


def test_snapshots_are_where_the_transport_has_them(small):
    """On GPUs of their own, on shared ones, in host memory, and on several hosts."""
    traces = traces_of(QWEN, small)

    def placed(changes: str = "", machine: PlannedMachine | None = None) -> tuple:
        plan = compare(changed(recipe(QWEN), changes), machine or gpus(), traces)
        kinds = [memory.bytes.get(k) for memory in plan.memory for k in ("snapshots", "received")]
        rates = {sync.transport: sync.seconds for sync in plan.syncs}
        return plan.transport, kinds, plan.host_bytes, set(rates)

    half, whole = traces.trainer.published * 2, traces.trainer.parameters * 2
    assert half == pytest.approx(whole / 2, rel=0.01)
    transport, kinds, host, possible = placed()
    assert (transport, host) == ("collective", {})
    assert kinds == [2 * half, None, None, traces.generator.weights]
    assert possible == {"shm", "file", "rdma", "collective"}
    nowhere = [None] * 4
    shared = {"snapshots": 2 * whole}
    assert placed("--trainer.weight_sync.transport shm")[:3] == ("shm", nowhere, shared)
    transport, kinds, host, possible = placed("--placement colocated", gpus(count=2))
    assert (transport, kinds, host["snapshots"]) == ("shm", nowhere, 2 * whole)
    assert host["offloaded"] == pytest.approx(12 * traces.trainer.parameters, rel=0.01)
    assert possible == {"shm", "file"}
    apart = gpus(count=4, per_host=2)
    relayed = placed(machine=apart)
    assert relayed[:3] == ("relay", nowhere, {"snapshots": 2 * whole, "received": 2 * whole})
    assert relayed[3] == {"relay", "rdma", "file"}
    read = placed("--trainer.weight_sync.transport rdma", apart)
    assert read[:3] == ("rdma", [2 * half, None, None, None], {"received": whole})
    with pytest.raises(ValueError, match="is collective, but the actors are on 2 hosts"):
        placed("--trainer.weight_sync.transport collective", apart)


def test_too_few_gpus_do_not_fit_however_large_they_are(small):
    config, three, traces = recipe(QWEN), gpus(count=3), traces_of(QWEN, small)
    plan = compare(config, three, traces)
    assert all(memory.fits for memory in plan.memory)
    assert not plan.fits
    assert plan.fix.startswith("the actors' parallelism needs 4 GPUs, and there are 3: set pla")
    assert compare(changed(config, "--placement colocated"), three, traces).fits
    # Actors that work at the same time cannot share.
    asynchronous = changed(config, "--max_offpolicy_steps 1")
    assert "there are 3: lower trainer.parallelism" in compare(asynchronous, three, traces).fix


def test_a_reference_is_counted_where_it_is(small):
    refers = "--trainer.loss.ref_kl.coef 0.1"
    config, traces = changed(recipe(QWEN), refers), traces_of(QWEN, small, refers)
    trainer, _, reference = compare(config, gpus(), traces).memory
    assert (reference.actor, reference.processes) == ("reference", 1)
    weights = reference.bytes["weights"]
    assert weights == pytest.approx(4 * traces.trainer.parameters, rel=0.01)
    assert 0 < reference.bytes["activations"] < trainer.bytes["activations"]
    assert "gradients" not in reference.bytes
    beside = compare(changed(config, "--placement colocated"), gpus(), traces).memory
    assert [m.bytes.get("reference") for m in beside[:2]] == [weights, weights]


@pytest.mark.parametrize("name", registry.built_in_recipes())
def test_every_recipe_can_be_planned(name, small):
    config = recipe(name)
    plan = compare(config, gpus(), traces_of(name, small if config.model else ""))
    assert plan.fits
    assert plan.transport == "collective"
    assert all(stage.seconds > 0 for stage in plan.stages)


PASSES = "--generator.engine.max_num_batched_tokens 1024 --trainer.activation_checkpoint"
"""Changes that leave the trainer to be what takes most."""
KV, SYNC = "--generator.engine.kv_cache_gib", "--trainer.weight_sync.transport"


@pytest.mark.parametrize(
    ("traced", "changes", "actor", "kind", "setting"),
    [
        (
            *(f"{PASSES} none", f"{KV} 0.1", "trainer"),
            *("activations", "--trainer.activation_checkpoint"),
        ),
        (
            *(f"{PASSES} full", f"{KV} 0.1 {SYNC} shm", "trainer"),
            *("activations", "--trainer.tokens_per_microbatch"),
        ),
        (
            *(f"{PASSES} full --trainer.tokens_per_microbatch 1024", f"{KV} 0.1", "trainer"),
            *("snapshots", SYNC),
        ),
        ("", f"{SYNC} shm", "generator", "KV cache", KV),
        ("", f"{KV} 0.001", "generator", "received", SYNC),
    ],
)
def test_what_a_plan_says_to_change_makes_it_fit(small, traced, changes, actor, kind, setting):
    config, traces = changed(recipe(QWEN), f"{traced} {changes}"), traces_of(QWEN, small, traced)
    [memory] = [m for m in compare(config, gpus(), traces).memory if m.actor == actor]
    gib = (memory.total - 0.1 * memory.bytes[kind]) / GIB  # a little less than it takes
    [wrong] = [m for m in compare(config, gpus(gib), traces).memory if m.actor == actor]
    assert not wrong.fits
    assert wrong.fix.split()[0] == setting
    if setting not in (KV, SYNC):
        traces = traces_of(QWEN, small, f"{traced} {wrong.fix}")
    found = compare(changed(config, wrong.fix), gpus(gib), traces).memory
    assert [m.fits for m in found if m.actor == actor] == [True]


def test_machines_by_name():
    machine = parse_machine("64xh100")
    assert (machine.name, machine.count, machine.per_host) == ("H100", 64, 8)
    assert machine.spans_hosts((0, 8))
    assert not machine.spans_hosts(tuple(range(8)))
    assert parse_machine("16xA100", hosts=4).per_host == 4
    assert parse_machine("Mine", memory_gib=10, tflops=5).gpu == PlannedGpu(10, 5, 1000, 25, 25)
    assert parse_machine("H100", memory_gib=40).gpu.memory_gib == 40


def test_this_machine_has_what_its_container_may_use(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "CONTROL_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{2 * GIB}\n")
    (tmp_path / "memory.current").write_text("0\n")
    machine = this_machine()
    assert machine.is_cpu
    assert machine.gpu.memory_gib == 2
    assert not machine.spans_hosts((0, 8))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: parse_machine("8xH10"), "did you mean 'H100'"),
        (lambda: parse_machine("8xH100", hosts=3), "cannot be on 3 hosts alike"),
        (
            lambda: make_plan(
                replace(recipe("grpo_sum_digits_qwen3_14b"), model="models/Nemo"),
                parse_machine("H100"),
            ),
            "no model whose shape is known",
        ),
        (
            lambda: make_plan(
                recipe("grpo_sum_digits_qwen3_14b"), parse_machine("H100"), prompt_tokens=1000
            ),
            "more than generator.engine.max_model_len",
        ),
        (
            lambda: make_plan(
                recipe("grpo_sum_digits_qwen3_14b"), parse_machine("H100"), hf_config="nowhere"
            ),
            "there is no such file",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(call, message):
    with pytest.raises((MachineError, PlanError), match=message):
        call()


def test_the_command_prints_tables_and_json(capsys, monkeypatch, small):
    monkeypatch.setenv("TORCHTITAN_RL_PLATFORM", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = ["--config", "grpo_sum_digits_qwen3_0_6b", "--hf_config", small]
    arguments += ["--gpus", "2xH100", "--prompts_per_step", "4"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    for word in ("KV cache", "trainer x1", "generator x1", "TFLOP", "rdma", "fits"):
        assert word in said
    assert main([*arguments, "--json", "--gpu_memory_gib", "1"]) == 1
    plan = json.loads(capsys.readouterr().out)
    assert not plan["fits"]
    assert plan["stages"][1]["bound"] in ("compute", "memory", "wire")
    assert main(["--config", "grpo_sum_digits_tiny", "--gpus", "8xH1"]) == 2
    assert "did you mean" in capsys.readouterr().err
