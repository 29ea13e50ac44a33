"""A setting that is declared as a number is one: of every config, and of tasks of one's own."""

import dataclasses
import typing
from dataclasses import dataclass, field

import numpy as np
import pytest

import torchtitan_rl.config
from torchtitan_rl.config import (
    CorrectionConfig,
    LossConfig,
    OptimizerConfig,
    SamplingConfig,
    TaskConfig,
)
from torchtitan_rl.core.configurable import Configurable
from torchtitan_rl.core.settings import checks_numbers, misses
from torchtitan_rl.tasks.answers import AnswerReward
from torchtitan_rl.tasks.sum_digits import SumDigits


@pytest.mark.parametrize(
    ("hint", "value", "wanted"),
    [
        (float, 0.5, ""),
        (float, 1, ""),
        (float, float("nan"), ""),  # whether it may be is for the config to say
        (float, np.float32(0.5), ""),
        (float, True, "a number"),
        (float, "0.5", "a number"),
        (float, None, "a number"),
        (float | None, None, ""),
        (float | None, False, "a number"),
        (int, 3, ""),
        (int, np.int64(3), ""),
        (int, True, "a whole number"),
        (int, 3.0, "a whole number"),
        (int | None, "3", "a whole number"),
        (int | float, 0.5, ""),
        (tuple[float, float], (0, 1.5), ""),
        (tuple[float, float] | None, (False, 1.5), "numbers"),
        (tuple[float, float], [0.5, "1"], "numbers"),
        (list[float], [0.5, True], "numbers"),
        (tuple[int, ...], (1, 2, True), "whole numbers"),
        # Not declared as numbers: not looked at.
        (bool, True, ""),
        (bool | int, True, ""),
        (str, True, ""),
        (float | str, True, ""),
        (tuple[str, ...], (True,), ""),
        (dict[str, float | str], {"flag": True}, ""),
        (typing.Any, True, ""),
    ],
)
def test_by_table(hint, value, wanted):
    assert misses(hint, value) == wanted


def number_fields():
    for name in torchtitan_rl.config.__all__:
        config = getattr(torchtitan_rl.config, name)
        if dataclasses.is_dataclass(config):
            for setting, hint in typing.get_type_hints(config).items():
                if misses(hint, True):
                    yield pytest.param(config, setting, id=f"{name}.{setting}")


@pytest.mark.parametrize(("config", "setting"), number_fields())
def test_no_config_takes_a_bool_for_a_number(config, setting):
    name = rf"{config.__name__}\.{setting}"
    with pytest.raises(ValueError, match=rf"{name} must be a( whole)? number; got True"):
        config(**{setting: True})


def test_what_is_wrong_is_said_before_anybody_computes_with_it():
    with pytest.raises(ValueError, match=r"importance_cap must be a number; got True"):
        CorrectionConfig(importance_weight="token", importance_cap=True)
    with pytest.raises(ValueError, match=r"token_mask_bounds must be numbers; got \(False, True\)"):
        CorrectionConfig(token_mask="on", token_mask_bounds=(False, True))
    with pytest.raises(ValueError, match=r"betas must be numbers; got \(0.9, True\)"):
        OptimizerConfig(betas=(0.9, True))
    with pytest.raises(ValueError, match=r"OptimizerConfig.lr must be a number; got '1e-4'"):
        OptimizerConfig(lr="1e-4")
    with pytest.raises(ValueError, match=r"SamplingConfig.n must be a whole number; got True"):
        dataclasses.replace(SamplingConfig(), n=True)
    with pytest.raises(ValueError, match=r"clip_low must be a number 0 to 1; got True"):
        LossConfig(kwargs={"clip_low": True})


def test_tasks_too():
    with pytest.raises(ValueError, match=r"SumDigits.Config.digits must be a whole number; got T"):
        SumDigits.Config(digits=True)
    with pytest.raises(ValueError, match=r"AnswerReward.format_reward must be a number"):
        AnswerReward(name="numeric", format_reward=True)
    with pytest.raises(ValueError, match=r"tolerance of task.reward.kwargs must be a number"):
        AnswerReward(name="numeric", kwargs={"tolerance": True})
    assert AnswerReward(kwargs={"ignore_case": True})("A", "a").value == 1

    class Coins(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(TaskConfig):
            sides: int = 2
            fair: bool = True
            names: list[str] = field(default_factory=list)

    assert Coins.Config(sides=6, fair=False).sides == 6
    with pytest.raises(ValueError, match=r"Coins.Config.sides must be a whole number; got True"):
        Coins.Config(sides=True)


def test_a_class_is_wrapped_once():
    init = SumDigits.Config.__init__
    assert checks_numbers(SumDigits.Config).__init__ is init
