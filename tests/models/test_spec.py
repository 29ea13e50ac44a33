"""From config.json to a torchtitan model: the parameters of public models, clear refusals."""

import json

import pytest
import torch

from torchtitan_rl.models.archs.registry import SHAPES
from torchtitan_rl.models.hf import ModelFolderError, check_parallelism, read_hf_config
from torchtitan_rl.models.makers.tiny import TINY_QWEN3
from torchtitan_rl.models.spec import build_on_meta, model_spec

MISTRAL = SHAPES["Mistral-7B-Instruct-v0.3"]
VALID = {**TINY_QWEN3, "vocab_size": 272}


def write_config(folder, config):
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    return folder


def without(*names):
    return {key: value for key, value in VALID.items() if key not in names}


TITANS = {
    "Qwen3-0.6B": ("qwen3", "0.6B"),
    "Qwen3-1.7B": ("qwen3", "1.7B"),
    "Qwen3-14B": ("qwen3", "14B"),
    "Qwen3-30B-A3B": ("qwen3", "30B-A3B"),
    "Llama-3.2-1B-Instruct": ("llama3", "1B"),
    "Llama-3.1-8B-Instruct": ("llama3", "8B"),
}
"""Models that torchtitan has too: its family and flavor."""


@pytest.mark.parametrize("name", TITANS)
def test_public_configs_give_torchtitans_own_parameters(tmp_path, name):
    # Here, not at the top: torchtitan may only be imported after torchtitan_rl.
    from torchtitan.models.llama3 import llama3_configs
    from torchtitan.models.qwen3 import qwen3_configs

    family, flavor = TITANS[name]
    with torch.device("meta"):
        # The attention backend has no parameters.
        flavors = {"qwen3": qwen3_configs, "llama3": llama3_configs}[family]
        expected = flavors[flavor](attn_backend="flex").build()
    model = build_on_meta(model_spec(write_config(tmp_path, SHAPES[name])))
    assert shapes(model) == shapes(expected)


MILLIONS = {
    "Llama-3.1-8B-Instruct": 8030,
    "Llama-3.1-70B-Instruct": 70554,
    "Llama-3.2-1B-Instruct": 1236,
    "Llama-3.2-3B-Instruct": 3213,
    "Llama-3.3-70B-Instruct": 70554,
    "Mistral-7B-Instruct-v0.3": 7248,
    "Qwen2.5-0.5B-Instruct": 494,
    "Qwen2.5-1.5B-Instruct": 1544,
    "Qwen2.5-3B-Instruct": 3086,
    "Qwen2.5-7B-Instruct": 7616,
    "Qwen2.5-14B-Instruct": 14770,
    "Qwen2.5-32B-Instruct": 32764,
    "Qwen2.5-72B-Instruct": 72706,
    "Qwen3-0.6B": 596,
    "Qwen3-1.7B": 1721,
    "Qwen3-4B": 4022,
    "Qwen3-8B": 8191,
    "Qwen3-14B": 14768,
    "Qwen3-32B": 32762,
    "Qwen3-30B-A3B": 30532,
    "Qwen3-235B-A22B": 235094,
    "SmolLM2-135M-Instruct": 135,
    "SmolLM2-360M-Instruct": 362,
    "SmolLM2-1.7B-Instruct": 1711,
    "SmolLM3-3B": 3075,
}
"""Parameters of public models in millions, as their makers state them."""


def test_public_configs_give_as_many_parameters_as_their_makers_state(tmp_path):
    assert MILLIONS.keys() == SHAPES.keys()
    for name, shape in SHAPES.items():
        model = build_on_meta(model_spec(write_config(tmp_path, shape)))
        assert round(sum(p.numel() for p in model.parameters()) / 1e6) == MILLIONS[name], name


def shapes(model):
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5000.0},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        {"rope_theta": 5000.0, "rope_scaling": None},
        {"rope_theta": 5000.0, "rope_scaling": {"rope_type": "default"}},
    ],
)
def test_rope_theta_is_read_from_old_and_new_configs(tmp_path, changes):
    spec = model_spec(write_config(tmp_path, VALID | changes))
    assert {layer.attention.rope.theta for layer in spec.model.layers} == {5000.0}


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ModelFolderError, match=r"no config\.json in '.*/nowhere'.*`model`"):
        read_hf_config(tmp_path / "nowhere")


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(ModelFolderError, match=f"no config.json in '{tmp_path}'"):
        model_spec(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("", "not valid JSON"),
        ('{"architectures": ', "not valid JSON"),
        ("[]", "config.json"),
        ('"Qwen3ForCausalLM"', "config.json"),
        (VALID | {"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel'; supported: Llama"),
        (
            VALID | {"architectures": ["GptOssForCausalLM"]},
            "lacks: attention sinks.*; supported: L",
        ),
        (VALID | {"architectures": []}, "'<none>'; supported: Llama.*Qwen3ForCausalLM"),
        (without("architectures"), "'<none>'; supported: Llama.*Qwen3ForCausalLM"),
        (without("hidden_size"), "lacks the field 'hidden_size'"),
        (without("intermediate_size"), "lacks the field 'intermediate_size'"),
        (without("num_hidden_layers"), "lacks the field 'num_hidden_layers'"),
        (without("rope_theta"), "lacks the field 'rope_theta'"),
        (VALID | {"attention_bias": True}, "attention_bias = True; only False is supported"),
        (VALID | {"hidden_act": "gelu"}, "hidden_act = 'gelu'; only 'silu' is supported"),
        (VALID | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE scaling 'yarn'"),
        (VALID | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "RoPE scaling 'yarn'"),
        (VALID | {"rope_parameters": {"rope_type": "llama3"}}, "'llama3' lacks factor, low_freq"),
        (VALID | {"partial_rotary_factor": 0.5}, "rotation of a part of each head"),
        (VALID | {"architectures": ["MistralForCausalLM"]}, "lacks the field 'sliding_window'"),
        (
            VALID | {"layer_types": ["full_attention", "sliding_attention"]},
            "type sliding_attention",
        ),
        (MISTRAL | {"sliding_window": 4096}, "sliding_window = 4096; only None is supported"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(tmp_path, config, message):
    with pytest.raises(ModelFolderError, match=message):
        model_spec(write_config(tmp_path, config))


@pytest.mark.parametrize("degree", [1, 2])
def test_tensor_parallelism_that_divides_the_heads_is_accepted(degree):
    check_parallelism(VALID, tensor_parallel=degree, who="trainer")


@pytest.mark.parametrize(
    ("degree", "who", "message"),
    [
        (3, "trainer", r"trainer tensor parallelism of 3 .* num_attention_heads \(4\)"),
        (4, "generator", r"generator tensor parallelism of 4 .* num_key_value_heads \(2\)"),
    ],
)
def test_tensor_parallelism_that_does_not_divide_the_heads_is_refused(degree, who, message):
    with pytest.raises(ValueError, match=message):
        check_parallelism(VALID, tensor_parallel=degree, who=who)
