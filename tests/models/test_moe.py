"""Mixtures of experts: the function transformers computes, and its routing replayed."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from transformers import AutoModelForCausalLM

from tests.models.support import forward, selected_experts, titan_model
from torchtitan_rl.core.experts import expert_dtype, filler
from torchtitan_rl.models.hf import (
    ModelFolderError,
    check_experts,
    check_parallelism,
    moe_layers,
    read_hf_config,
)
from torchtitan_rl.models.makers.tiny import TINY_QWEN3, TINY_QWEN3_MOE, write_tiny_model
from torchtitan_rl.models.router_replay import find_routers, replay_routing
from torchtitan_rl.models.spec import build_on_meta, model_spec

TOKENS = torch.randint(0, 265, (3, 47), generator=torch.Generator().manual_seed(0))
CONFIG = {**TINY_QWEN3_MOE, "num_experts": 8, "vocab_size": 272}


@pytest.fixture
def model(moe_model):
    return titan_model(moe_model)


@pytest.fixture(scope="module")
def reference(moe_model):
    return AutoModelForCausalLM.from_pretrained(moe_model, dtype=torch.float32)


def any_routing(seed=0):
    """Two different experts of eight for each of TOKENS and each of two layers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(TOKENS.numel(), 2, 8, generator=generator).argsort(dim=-1)[..., :2]


def write_config(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- the model ----------------------------------------------------------------------------------


def test_it_computes_and_chooses_what_transformers_does(model, reference):
    with torch.no_grad():
        expected = reference(TOKENS, output_router_logits=True)
        logits = forward(model, TOKENS)
    assert expected.logits.std() > 0.5
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-5)
    chosen = torch.stack([r.topk(2).indices for r in expected.router_logits], dim=1)
    assert torch.equal(chosen.sort().values, selected_experts(model, TOKENS).sort().values)


def test_its_gradient_is_that_of_transformers(model, reference, moe_model):
    reference.zero_grad()
    for logits in (forward(model, TOKENS), reference(TOKENS).logits):
        logits.log_softmax(-1)[..., 7].sum().backward()
    spec = model_spec(moe_model)
    adapter = spec.state_dict_adapter(spec.model, str(moe_model))
    ours = {name: p.grad for name, p in model.named_parameters()}
    for layer in (1, 2):
        expected = reference.model.layers[layer].mlp
        prefix, experts = f"layers.{layer}.moe", f"layers.{layer}.moe.routed_experts.inner_experts"
        named = adapter.to_hf({n: g for n, g in ours.items() if n.startswith(prefix)})
        gate = named[f"model.layers.{layer}.mlp.gate.weight"]
        torch.testing.assert_close(gate, expected.gate.weight.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            torch.cat([ours[f"{experts}.w1_EFD"], ours[f"{experts}.w3_EFD"]], dim=1),
            expected.experts.gate_up_proj.grad,
            rtol=1e-4,
            atol=1e-5,
        )


def test_an_expert_without_a_token_has_no_gradient_and_harms_nobody(model):
    routing = torch.tensor([0, 1]).expand(TOKENS.numel(), 2, 2)
    with replay_routing(model, routing):
        forward(model, TOKENS).sum().backward()
    gradient = model.get_parameter("layers.1.moe.routed_experts.inner_experts.w1_EFD").grad
    assert gradient[:2].abs().sum() > 0
    assert not gradient[2:].any()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mlp_only_layers": [0]}, [1, 2, 3, 4, 5]),
        ({"mlp_only_layers": [0, 1, 3]}, [2, 4, 5]),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, [1, 3, 5]),
        ({"mlp_only_layers": [5], "decoder_sparse_step": 2}, [1, 3]),
        ({"mlp_only_layers": None, "decoder_sparse_step": 1}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_layers_are_dense_or_not_as_the_config_says(tmp_path, changes, expected):
    config = {**CONFIG, "num_hidden_layers": 6, **changes}
    assert moe_layers(config) == expected
    model = build_on_meta(model_spec(write_config(tmp_path, config)))
    sparse = [int(number) for number, layer in model.layers.items() if layer.moe_enabled]
    assert sparse == expected
    assert len(find_routers(model)) == len(expected)


def test_the_same_seed_gives_the_same_experts(tmp_path):
    first, again = (write_tiny_model(tmp_path / name, seed=3, experts=4) for name in "ab")
    assert [(first / f.name).read_bytes() == f.read_bytes() for f in again.iterdir()].count(0) == 0
    names = load_file(first / "model.safetensors").keys()
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in names


def test_a_config_that_transformers_5_wrote_is_read(tmp_path):
    config = {**CONFIG, "num_local_experts": 8}
    del config["num_experts"]
    assert read_hf_config(write_config(tmp_path, config))["num_experts"] == 8


@pytest.mark.parametrize("name", ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
def test_a_config_that_lacks_a_field_is_refused(tmp_path, name):
    config = {key: value for key, value in CONFIG.items() if key != name}
    with pytest.raises(ModelFolderError, match=f"lacks the field '{name}'"):
        model_spec(write_config(tmp_path, config))


def test_tensor_parallelism_must_divide_the_experts():
    check_parallelism(CONFIG, tensor_parallel=2, who="trainer")
    with pytest.raises(ValueError, match=r"moe_intermediate_size \(95\)"):
        check_parallelism({**CONFIG, "moe_intermediate_size": 95}, tensor_parallel=2, who="trainer")


def test_expert_parallelism_must_divide_the_number_of_experts():
    check_parallelism(CONFIG, tensor_parallel=1, expert_parallel=4, who="trainer")
    with pytest.raises(ValueError, match=r"trainer expert parallelism of 3 .* num_experts \(8\)"):
        check_parallelism(CONFIG, tensor_parallel=1, expert_parallel=3, who="trainer")
    with pytest.raises(ValueError, match="the model has no experts"):
        check_parallelism(TINY_QWEN3, tensor_parallel=1, expert_parallel=2, who="trainer")


def test_a_dense_model_has_no_routing_to_return():
    check_experts(CONFIG, setting="some.setting")
    with pytest.raises(ValueError, match=r"some\.setting is on, but .* no experts; switch it off"):
        check_experts(TINY_QWEN3, setting="some.setting")


# ---- replay -------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [None, FullAC, SelectiveAC])
def test_replay_selects_exactly_and_the_gate_learns(model, recompute):
    if recompute:
        recompute.Config().build(dump_folder="").apply(model)
    routing, seen = any_routing(), []
    for router in find_routers(model):
        router.register_forward_hook(lambda _, __, output: seen.append(output[1].flatten(0, 1)))
    with replay_routing(model, routing.to(torch.uint8)):
        forward(model, TOKENS).log_softmax(-1)[..., 7].sum().backward()
    # Layer 0 is dense: the two columns are layers 1 and 2, and once more on the way back.
    expected = [routing[:, 0], routing[:, 1]] + [routing[:, 1], routing[:, 0]] * bool(recompute)
    assert len(seen) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
    for router in find_routers(model):
        assert router.gate.weight.grad.abs().sum() > 0


def test_replaying_its_own_selection_changes_neither_output_nor_gradient(model):
    routing = selected_experts(model, TOKENS)
    results = []
    for replayed in (None, routing):
        model.zero_grad()
        with replay_routing(model, replayed):
            logits = forward(model, TOKENS)
            logits.log_softmax(-1)[..., 7].sum().backward()
        results.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
    for plain, replayed in zip(*results, strict=True):
        torch.testing.assert_close(replayed, plain, rtol=1e-5, atol=1e-6)


def test_the_scores_are_those_of_the_live_router(model):
    with torch.no_grad():
        with replay_routing(model, any_routing()):
            before = forward(model, TOKENS)
            find_routers(model)[0].gate.weight.mul_(3.0)
            after = forward(model, TOKENS)
        assert (before - after).abs().max() > 1e-2


def test_nothing_is_left_behind_when_the_block_fails(model):
    expected = selected_experts(model, TOKENS)

    def fail_inside():
        with replay_routing(model, any_routing()):
            forward(model, TOKENS)
            raise KeyError("loss")

    with pytest.raises(KeyError, match="loss"):
        fail_inside()
    assert all(router.selection is None for router in find_routers(model))
    assert torch.equal(selected_experts(model, TOKENS), expected)


def test_nothing_is_taken_over_from_an_earlier_microbatch(model):
    for router in find_routers(model):
        router.selection = any_routing()[:, 0]
    with replay_routing(model, None):
        assert all(router.selection is None for router in find_routers(model))


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (
            any_routing()[:, :1],
            r"shape \(141, 1, 2\); the model needs \[tokens, 2 layers.* top 2\]",
        ),
        (any_routing()[..., :1], r"shape \(141, 2, 1\)"),
        (any_routing().flatten(0, 1), r"shape \(282, 2\)"),
        (any_routing()[:-1], "has 140 tokens; the forward pass has 3 rows of 47"),
    ],
)
def test_routing_that_does_not_fit_is_refused(model, routing, message):
    def run():
        with replay_routing(model, routing):
            forward(model, TOKENS)

    with pytest.raises(ValueError, match=message):
        run()
    assert all(router.selection is None for router in find_routers(model))


def test_a_dense_model_has_nothing_to_replay(tiny_model):
    model = titan_model(tiny_model)
    with replay_routing(model, None):
        forward(model, TOKENS)
    with pytest.raises(ValueError, match="no experts"), replay_routing(model, any_routing()):
        pass


def test_filler_is_valid_routing(model):
    with replay_routing(model, torch.from_numpy(filler(TOKENS.numel(), 2, 2, expert_dtype(8)))):
        assert forward(model, TOKENS).isfinite().all()
