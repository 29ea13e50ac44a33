"""NVIDIA's driver, asked through a library of the same interface that the tests compile."""

import subprocess
from pathlib import Path

import pytest
import torch

from torchtitan_rl.platform import device_type, nvml
from torchtitan_rl.platform.nvml import Driver, Gpu, driver_problem, read_driver

GIB = 2**30
GPUS = (Gpu("NVIDIA H100", (9, 0), 80 * GIB, 79 * GIB), Gpu("NVIDIA GB10", (12, 1)))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    built = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("stub_nvml.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", built, source], check=True)
    return built


@pytest.fixture
def driver(library, monkeypatch):
    """A driver of the year before torch, with a torch that is built for CUDA and finds no GPU."""
    monkeypatch.setattr(nvml, "LIBRARY", str(library))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("TORCHTITAN_RL_PLATFORM", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    device_type.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    device_type.cache_clear()


def test_the_driver_tells_its_version_and_its_gpus(driver):
    assert read_driver() == Driver("550.54.14", (12, 4), GPUS)


@pytest.mark.parametrize(
    ("chosen", "seen"),
    [("1", [1]), ("1,0", [1, 0]), ("0,7,1", [0]), ("", []), ("-1", []), ("GPU-0a1b", [0, 1])],
)
def test_a_gpu_that_is_hidden_is_not_there(driver, chosen, seen):
    driver.setenv("CUDA_VISIBLE_DEVICES", chosen)
    found = read_driver()
    assert found is not None
    assert list(found.gpus) == [GPUS[number] for number in seen]


@pytest.mark.parametrize("asked", ["", "cuda"])
def test_a_driver_too_old_for_torch_is_refused_by_name(driver, asked):
    driver.setenv("TORCHTITAN_RL_PLATFORM", asked)
    wanted = r"driver 550\.54\.14 runs CUDA up to 12\.4, and torch here is built for CUDA 13\.0: "
    with pytest.raises(ValueError, match=rf"{wanted}install driver 580\.65\.06 or newer"):
        device_type()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCHTITAN_RL_PLATFORM", "cpu"),
        ("CUDA_VISIBLE_DEVICES", ""),
        ("CUDA_VISIBLE_DEVICES", "-1"),
    ],
)
def test_who_wants_no_gpu_needs_no_driver(driver, name, value):
    driver.setenv(name, value)
    assert device_type() == "cpu"


def test_a_torch_for_the_cpu_needs_no_driver(driver):
    driver.setattr(torch.version, "cuda", None)
    assert device_type() == "cpu"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (9, None),  # the library without a driver, as in a container
        (18, Driver(error="the driver was updated while it was in use: restart the machine")),
        (15, Driver(error="GPU is lost")),
    ],
)
def test_a_driver_that_cannot_be_asked(driver, code, found):
    driver.setenv("NVML_INIT", str(code))
    assert read_driver() == found
    if found is None:
        assert device_type() == "cpu"
    else:
        with pytest.raises(ValueError, match=f"NVIDIA's driver says: {found.error}"):
            device_type()


def test_a_driver_that_stops_answering_is_an_error_that_names_the_question(driver):
    driver.setenv("NVML_COUNT", "15")
    assert read_driver() == Driver(error="nvmlDeviceGetCount_v2: GPU is lost")


@pytest.mark.parametrize(
    ("cuda", "built_for", "enough"),
    [
        ((13, 0), "13.0", True),
        ((13, 0), "13.2", True),
        ((12, 9), "13.0", False),
        ((13, 1), "12.8", True),
    ],
)
def test_a_driver_runs_what_is_built_for_its_major_version_or_an_older_one(cuda, built_for, enough):
    assert (driver_problem(Driver("1.2", cuda, GPUS), built_for) == "") == enough
    assert driver_problem(Driver("1.2", cuda), built_for) == ""  # no GPU to run it on
