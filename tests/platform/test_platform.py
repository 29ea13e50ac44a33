"""CPU or CUDA: which is here, and what follows from it."""

import mmap
import os
import subprocess
import sys

import pytest
import torch

from torchtitan_rl.platform import (
    _TRITON_KERNELS,
    _NeedsTriton,
    adapt_torchtitan,
    available_cores,
    check_compiler,
    check_gpus,
    default_threads,
    device_type,
    memory_in_use,
    resolve_dtype,
    worker_env,
)


@pytest.fixture
def machine(monkeypatch):
    """Sets what the user asked for and what the machine has; the answer is cached per process."""

    def setup(*, asked, has_cuda):
        monkeypatch.setenv("TORCHTITAN_RL_PLATFORM", asked)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
        device_type.cache_clear()

    yield setup
    monkeypatch.undo()
    device_type.cache_clear()


@pytest.mark.parametrize(
    ("asked", "has_cuda", "device"),
    [
        ("", False, "cpu"),
        ("", True, "cuda"),
        ("cpu", False, "cpu"),
        ("cpu", True, "cpu"),
        ("cuda", True, "cuda"),
    ],
)
def test_device_type(machine, asked, has_cuda, device):
    machine(asked=asked, has_cuda=has_cuda)
    assert device_type() == device


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("tpu", "TORCHTITAN_RL_PLATFORM is 'tpu'; it can be 'cpu' or 'cuda'"),
        ("CPU", "TORCHTITAN_RL_PLATFORM is 'CPU'"),
        ("cuda", "TORCHTITAN_RL_PLATFORM is 'cuda' but torch sees no CUDA device"),
    ],
)
def test_an_impossible_override_is_refused(machine, asked, message):
    machine(asked=asked, has_cuda=False)
    with pytest.raises(ValueError, match=message):
        device_type()


@pytest.mark.parametrize(
    ("asked", "dtype", "resolved"),
    [
        ("cpu", "auto", "float32"),
        ("cuda", "auto", "bfloat16"),
        ("cpu", "bfloat16", "bfloat16"),
        ("cuda", "float32", "float32"),
    ],
)
def test_resolve_dtype(machine, asked, dtype, resolved):
    machine(asked=asked, has_cuda=True)
    assert resolve_dtype(dtype) == resolved


@pytest.mark.parametrize("role", ["trainer", "generator", "grader"])
@pytest.mark.parametrize(("threads", "expected"), [(3, "3"), (0, str(available_cores()))])
def test_a_worker_gets_its_threads(role, threads, expected):
    env = worker_env(threads, role=role)
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == expected
    assert all(isinstance(value, str) for value in env.values())


@pytest.mark.parametrize(
    ("asked", "gpus", "processes", "threads"),
    [
        ("cpu", 0, 1, 96),  # actors take turns
        ("cpu", 0, 4, 24),
        ("cuda", 8, 1, 12),  # eight processes run at once
        ("cuda", 8, 4, 12),
        ("cuda", 1, 1, 96),
        ("cuda", 1, 2, 48),
        ("cuda", 200, 1, 1),
    ],
)
def test_processes_that_run_at_once_share_the_cores(
    machine, monkeypatch, asked, gpus, processes, threads
):
    machine(asked=asked, has_cuda=True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(96))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert default_threads(processes) == threads
    if processes == 1:
        assert worker_env(0, role="generator")["OMP_NUM_THREADS"] == str(threads)


def test_only_the_generator_gets_settings_of_vllm():
    with_vllm = {
        role
        for role in ("trainer", "generator", "grader")
        if any(name.startswith("VLLM_") for name in worker_env(1, role=role))
    }
    assert with_vllm == {"generator"}


@pytest.mark.parametrize(
    ("asked", "keeping"),
    [("cpu", {"trainer", "generator", "reference"}), ("cuda", set())],
)
def test_only_who_computes_on_a_cpu_keeps_freed_memory(machine, asked, keeping):
    machine(asked=asked, has_cuda=True)
    roles = ("trainer", "generator", "reference", "grader", "environment")
    assert {r for r in roles if "MALLOC_TRIM_THRESHOLD_" in worker_env(1, role=r)} == keeping


def test_freed_memory_is_given_back_when_it_is_asked_for():
    script = """
import ctypes, psutil
from torchtitan_rl.platform import release_freed_memory
pieces = [ctypes.create_string_buffer(1 << 20) for _ in range(64)]
last = ctypes.create_string_buffer(1 << 20)  # what lies above keeps the heap from shrinking
held = psutil.Process().memory_info().rss
del pieces
kept = psutil.Process().memory_info().rss
release_freed_memory()
print(held - kept, held - psutil.Process().memory_info().rss)
"""
    env = os.environ | worker_env(1, role="trainer")
    run = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
    )
    kept, released = map(int, run.stdout.split())
    assert kept < 8 << 20 < 56 << 20 < released


@pytest.mark.parametrize(("asked", "binds_itself"), [("cpu", False), ("cuda", True)])
def test_vllm_binds_no_threads_on_a_cpu(machine, asked, binds_itself):
    machine(asked=asked, has_cuda=True)
    env = worker_env(1, role="generator")
    assert ("VLLM_CPU_OMP_THREADS_BIND" not in env) == binds_itself
    assert env.get("VLLM_CPU_OMP_THREADS_BIND", "nobind") == "nobind"


def test_the_users_vllm_log_level_is_kept(monkeypatch):
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    assert worker_env(1, role="generator")["VLLM_LOGGING_LEVEL"] == "ERROR"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert worker_env(1, role="generator")["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_the_stand_in_for_triton_kernels_has_any_name_and_raises_when_one_is_called():
    kernels = _NeedsTriton("package.kernels")
    grouped_gemm = kernels.grouped_gemm
    with pytest.raises(RuntimeError, match=r"package\.kernels\.grouped_gemm needs Triton"):
        grouped_gemm(1, key=2)
    with pytest.raises(AttributeError, match="__path__"):
        _ = kernels.__path__


def test_adapting_torchtitan_leaves_kernels_that_are_there_alone(monkeypatch):
    real = object()
    monkeypatch.setitem(sys.modules, _TRITON_KERNELS, real)
    adapt_torchtitan()
    assert sys.modules[_TRITON_KERNELS] is real


@pytest.mark.parametrize(
    ("has_cuda", "variable", "usual"), [(False, "CXX", "g[+][+]"), (True, "CC", "gcc or clang")]
)
def test_compiling_without_a_compiler_is_refused(
    machine, monkeypatch, tmp_path, has_cuda, variable, usual
):
    machine(asked="", has_cuda=has_cuda)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ValueError, match=f"no {usual} here: .* leave trainer.compile out"):
        check_compiler()
    monkeypatch.setenv(variable, f"{tmp_path}/mine -v")
    with pytest.raises(ValueError, match=f"no {tmp_path}/mine here"):
        check_compiler()
    (tmp_path / "mine").touch(mode=0o755)
    check_compiler()


@pytest.fixture
def gpus(machine, monkeypatch):
    """Sets how many GPUs the machine has."""

    def setup(count):
        machine(asked="cuda", has_cuda=True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return setup


def test_too_few_gpus_are_refused_with_the_placement_that_needs_fewer(gpus):
    gpus(1)
    check_gpus(1, can_share=True)
    with pytest.raises(ValueError, match=r"needs 2 GPUs, and there are 1: .*colocated"):
        check_gpus(2, can_share=True)
    with pytest.raises(ValueError, match=r"needs 2 GPUs, and there are 1: lower trainer"):
        check_gpus(2, can_share=False)


def test_actors_that_share_gpus_see_the_same_ones(gpus):
    gpus(2)
    seen = {
        role: worker_env(1, role=role, gpus=range(2))["CUDA_VISIBLE_DEVICES"]
        for role in ("trainer", "generator", "reference")
    }
    assert set(seen.values()) == {"0,1"}


def test_memory_of_a_cpu_process_is_its_own(machine):
    machine(asked="cpu", has_cuda=False)
    size, before = 2**26, memory_in_use()
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as own:
        own[:: mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)
        assert abs(memory_in_use() - before - size) < 2**23
        with mmap.mmap(-1, size) as shared:
            shared[:: mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)
            assert abs(memory_in_use() - before - size) < 2**23
    assert abs(memory_in_use() - before) < 2**23


def test_memory_of_a_gpu_is_all_that_is_taken(machine, monkeypatch):
    machine(asked="cuda", has_cuda=True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30, 80))
    assert memory_in_use() == 50
