"""From config.json to a torchtitan model: same function, same parameters, clear refusals."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.models.support import forward, noisy_copy, titan_model
from torchtitan_rl.models.hf import ModelFolderError, check_parallelism, read_hf_config
from torchtitan_rl.models.makers.tiny import TINY_QWEN3
from torchtitan_rl.models.spec import build_on_meta, model_spec

VALID = {**TINY_QWEN3, "vocab_size": 272}


def write_config(folder, config):
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    return folder


def without(*names):
    return {key: value for key, value in VALID.items() if key not in names}


def test_the_tiny_model_computes_what_transformers_computes(tiny_model, tmp_path):
    folder = noisy_copy(tiny_model, tmp_path / "model")
    tokens = torch.randint(0, 265, (3, 70))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = forward(titan_model(folder), tokens)
        expected = reference(tokens).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("head_dim", [None, 24])
def test_a_llama_computes_what_transformers_computes(tmp_path, head_dim):
    shape = {k: v for k, v in TINY_QWEN3.items() if k not in ("architectures", "model_type")}
    config = LlamaConfig(**shape | {"vocab_size": 90, "head_dim": head_dim})
    torch.manual_seed(0)
    reference = LlamaForCausalLM(config)
    for weight in reference.parameters():
        weight.data += torch.randn_like(weight) * (0.3 if weight.dim() == 1 else 0.06)
    reference.save_pretrained(tmp_path)
    tokens = torch.randint(0, 90, (2, 30))
    with torch.no_grad():
        logits = titan_model(tmp_path)(tokens=tokens, positions=torch.arange(30).expand(2, 30))
        expected = reference(tokens).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1_000_000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_scaling": None,
}


@pytest.mark.parametrize(
    ("flavor", "hidden", "layers", "heads", "intermediate", "tied", "millions"),
    [
        ("0.6B", 1024, 28, 16, 3072, True, 596),
        ("1.7B", 2048, 28, 16, 6144, True, 1720),
        ("14B", 5120, 40, 40, 17408, False, 14768),
    ],
)
def test_public_qwen3_configs_give_torchtitans_own_parameters(
    tmp_path, flavor, hidden, layers, heads, intermediate, tied, millions
):
    # Here, not at the top: torchtitan may only be imported after torchtitan_rl.
    from torchtitan.models.qwen3 import qwen3_configs

    config = QWEN3 | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        "tie_word_embeddings": tied,
    }
    model = build_on_meta(model_spec(write_config(tmp_path, config)))
    with torch.device("meta"):
        # The attention backend has no parameters.
        expected = qwen3_configs[flavor](attn_backend="flex").build()
    assert shapes(model) == shapes(expected)
    assert sum(p.numel() for p in model.parameters()) // 1_000_000 == millions


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
        (VALID | {"rope_parameters": {"rope_type": "llama3"}}, "RoPE scaling 'llama3'"),
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
