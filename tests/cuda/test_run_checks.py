"""What a run on GPUs looks at before it starts anything."""

from dataclasses import replace

import pytest

from tests.platform.test_doctor import ON_CPU, ON_GPU, USED
from tests.support import low_tokens
from torchtitan_rl.config import GeneratorConfig
from torchtitan_rl.run import checks
from torchtitan_rl.run.checks import check_installation


@pytest.fixture
def on(monkeypatch):
    """Has a run start on this machine."""

    def start(machine, config=None):
        asked = []
        monkeypatch.setattr(checks, "examine", lambda paths: (asked.extend(paths), machine)[1])
        said = check_installation(config or low_tokens())
        assert asked == ["outputs"]
        return said

    return start


def test_a_sound_machine_is_passed_in_silence(on):
    assert on(ON_GPU) == []


def test_an_install_for_the_cpu_is_not_looked_at(on):
    assert on(replace(ON_CPU, loopback="Permission denied")) == []


def test_everything_that_would_fail_is_said_at_once(on):
    with pytest.raises(ValueError, match="a run would fail here:\n") as refused:
        on(replace(ON_GPU, headers=False, compiler=""))
    said = str(refused.value).splitlines()[1:]
    assert [line.partition(":")[0] for line in said] == ["compiler", "headers"]


def test_what_may_fail_is_a_note(on):
    machine = replace(ON_GPU, driver=replace(ON_GPU.driver, gpus=USED))
    [note] = on(machine)
    assert note.startswith("GPU memory: others use GPU 1: 60.0 of 80.0 GiB")


def test_a_generator_of_ones_own_needs_no_vllm(on):
    machine = replace(ON_GPU, packages={"torch": "2.13.0"})
    with pytest.raises(ValueError, match="no vLLM"):
        on(machine)
    config = replace(low_tokens(), generator=GeneratorConfig(backend="simulated"))
    assert on(machine, config) == []
