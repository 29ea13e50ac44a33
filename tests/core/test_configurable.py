"""Configs that build the class they are nested in."""

import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from torchtitan_rl.config import SamplingConfig
from torchtitan_rl.core.configurable import Configurable


class Coins(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        sides: int = 2
        sampling: SamplingConfig = field(default_factory=SamplingConfig)
        weights: tuple[float, ...] = (1.0, 2.0)

    def __init__(self, config: Config, *, seed: int) -> None:
        self.config, self.seed = config, seed


def test_a_config_builds_its_class_with_a_copy_of_itself():
    config = Coins.Config(sides=6)
    coins = config.build(seed=3)
    assert isinstance(coins, Coins)
    assert coins.config == config
    assert coins.config is not config
    assert coins.seed == 3


def test_settings_as_plain_values():
    settings = Coins.Config(sampling=SamplingConfig(n=4)).to_dict()
    assert settings["sides"] == 2
    assert settings["sampling"]["n"] == 4
    assert settings["weights"] == [1.0, 2.0]


def test_a_config_without_a_class_cannot_build():
    @dataclass(kw_only=True, slots=True)
    class Loose(Configurable.Config):
        pass

    with pytest.raises(TypeError, match="Loose is not nested in a Configurable class"):
        Loose().build()


@pytest.mark.parametrize("options", [{"kw_only": True}, {"slots": True}])
def test_a_config_must_be_declared_like_the_others(options):
    with pytest.raises(TypeError, match=r"Wrong.Config must be a @dataclass\(kw_only=True"):

        class Wrong(Configurable):
            @dataclass(**options)
            class Config(Configurable.Config):
                sides: int = 2


def test_graders_and_environments_need_no_torch():
    code = """
import sys
from torchtitan_rl.actors import environment, grader
from torchtitan_rl.tasks.calculator import Calculator
Calculator.Config().build(seed=0)
print(sorted({"torch", "torchtitan", "transformers", "vllm"} & sys.modules.keys()))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "[]\n", run.stderr
