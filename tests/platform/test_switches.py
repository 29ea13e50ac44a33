"""Optimizations that a variable of the environment switches off."""

import pytest

from torchtitan_rl.cli.train import main as train
from torchtitan_rl.platform import worker_env
from torchtitan_rl.platform.switches import NAMES, VARIABLE, enabled


@pytest.mark.parametrize(
    ("without", "norms", "direct_load"),
    [
        (None, True, True),
        ("", True, True),
        ("norms", False, True),
        ("direct_load, norms ,", False, False),
    ],
)
def test_what_the_variable_names_is_off(monkeypatch, without, norms, direct_load):
    monkeypatch.delenv(VARIABLE, raising=False)
    if without is not None:
        monkeypatch.setenv(VARIABLE, without)
    assert (enabled("norms"), enabled("direct_load")) == (norms, direct_load)


def test_an_unknown_name_is_refused_before_a_run_starts(monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, "direct_load,norm")
    with pytest.raises(ValueError, match="unknown name 'norm'; did you mean 'norms'"):
        enabled("norms")
    assert train(["--config", "grpo_sum_digits_tiny"]) == 2
    assert "did you mean 'norms'" in capsys.readouterr().err


def test_a_setting_of_a_workers_environment_can_be_left_out(monkeypatch):
    everything = worker_env(1, role="trainer")
    assert {name for name in NAMES if name.isupper()} <= everything.keys()
    monkeypatch.setenv(VARIABLE, "MALLOC_TRIM_THRESHOLD_")
    assert everything.items() - worker_env(1, role="trainer").items() == {
        ("MALLOC_TRIM_THRESHOLD_", everything["MALLOC_TRIM_THRESHOLD_"])
    }
