"""Renamed settings: an old name is answered with the new one, wherever it is used."""

from dataclasses import replace

import pytest

from torchtitan_rl.cli.train import parse
from torchtitan_rl.config import GeneratorConfig, RolloutConfig, RunConfig
from torchtitan_rl.config.renames import RENAMED, new_name, renamed_flag
from torchtitan_rl.recipes import grpo_sum_digits_tiny


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--generator_replicas 2", "--generator_replicas is now --generator.replicas"),
        ("--no_save_rollouts", "--no_save_rollouts is now --log.no_rollouts"),
        ("--environment.timeout_seconds=3", "is now --rollout.environment.timeout_seconds"),
        ("--rollout.holdout_share 0.1", "is now --rollout.untrained_share"),
        ("--generator.death_rate 0.1", "is now --generator.kwargs death_rate <value>"),
    ],
)
def test_an_old_flag_is_answered_with_the_new_one(old, new):
    with pytest.raises(ValueError, match=new):
        parse(["--config", "grpo_sum_digits_tiny", *old.split()])


@pytest.mark.parametrize("flag", ["--steps", "--rollout.thinking", "thinking", "--task.thinking"])
def test_other_flags_are_left_alone(flag):
    assert renamed_flag(flag) is None


def test_an_old_keyword_of_a_recipe_is_answered_with_the_new_name():
    with pytest.raises(TypeError, match=r"RunConfig: 'thinking' is now 'rollout.thinking'"):
        RunConfig(task=None, thinking=True)  # type: ignore[arg-type, call-arg]
    with pytest.raises(TypeError, match=r"'check_weights' is now 'trainer.weight_sync.check'"):
        replace(grpo_sum_digits_tiny(), check_weights=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'holdout_share' is now 'rollout.untrained_share'"):
        RolloutConfig(holdout_share=0.1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'death_rate' is now 'generator.kwargs.death_rate'"):
        GeneratorConfig(death_rate=0.1)  # type: ignore[call-arg]


def test_every_new_name_is_a_setting():
    settings = grpo_sum_digits_tiny().to_dict()
    for old, new in RENAMED.items():
        value = settings
        for part in new.partition(".kwargs.")[0].split("."):
            value = value[part]
        assert new_name(old) == new
        assert new_name(new) is None
