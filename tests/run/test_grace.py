"""How long a run may take to stop."""

from dataclasses import replace

import pytest

from tests.cuda.pretend import shape_folder
from tests.support import low_tokens
from torchtitan_rl.config import Parallelism, SupervisionConfig
from torchtitan_rl.models.hf import tensor_shapes
from torchtitan_rl.run import grace
from torchtitan_rl.run.grace import grace_seconds


def config_of(model, *, ranks=1, grace_seconds=None):
    config = low_tokens()
    trainer = replace(config.trainer, parallelism=Parallelism(data_parallel_shard_degree=ranks))
    supervision = SupervisionConfig(grace_seconds=grace_seconds)
    return replace(config, model=str(model), trainer=trainer, supervision=supervision)


def test_a_tiny_model_stops_within_seconds(tiny_model):
    assert 1.5 < grace_seconds(config_of(tiny_model), 0.0) < 1.6
    assert 3.5 < grace_seconds(config_of(tiny_model), 2.0) < 3.6


def test_a_large_model_has_the_time_that_its_checkpoint_takes(monkeypatch):
    """14.8e9 parameters are 178 GB of weights and moments; four ranks write 2 GB a second."""
    monkeypatch.setattr(grace, "tensor_shapes", lambda folder: {"all": (14_800_000, 1000)})
    assert grace_seconds(config_of("m", ranks=4), 30.0) == pytest.approx(1.5 + 30 + 88.8)


def test_the_setting_is_taken_as_it_is(tiny_model):
    assert grace_seconds(config_of(tiny_model, grace_seconds=120.0), 5.0) == 120.0
    assert grace_seconds(config_of(tiny_model, grace_seconds=0.0), 5.0) == 0.0
    with pytest.raises(ValueError, match=r"supervision\.grace_seconds must be 0 or more; got -1"):
        SupervisionConfig(grace_seconds=-1)


def test_a_model_without_weights_yet_is_a_small_one(tmp_path):
    folder = shape_folder("Qwen3-0.6B", tmp_path)
    with pytest.raises(ValueError, match=r"no .*safetensors"):
        tensor_shapes(folder)
    assert grace_seconds(config_of(folder), 0.0) == 1.5
