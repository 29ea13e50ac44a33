"""Optimizations that a variable of the environment switches off."""

import pytest

from torchtitan_rl.platform import worker_env
from torchtitan_rl.platform.switches import VARIABLE, enabled


@pytest.mark.parametrize(
    ("without", "sampler", "garbage"),
    [(None, True, True), ("", True, True), ("sampler", False, True), ("garbage,a", True, False)],
)
def test_what_the_variable_names_is_off(monkeypatch, without, sampler, garbage):
    monkeypatch.delenv(VARIABLE, raising=False)
    if without is not None:
        monkeypatch.setenv(VARIABLE, without)
    assert (enabled("sampler"), enabled("garbage")) == (sampler, garbage)


def test_a_setting_of_a_workers_environment_can_be_left_out(monkeypatch):
    everything = worker_env(1, role="trainer")
    monkeypatch.setenv(VARIABLE, "GOMP_SPINCOUNT")
    assert everything.items() - worker_env(1, role="trainer").items() == {
        ("GOMP_SPINCOUNT", everything["GOMP_SPINCOUNT"])
    }
