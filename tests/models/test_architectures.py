"""Every architecture, by a tiny model of it: what transformers computes, to its gradient, at short
and long positions; its tensors come back to the byte; shared prompts change nothing."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.models.architectures import TINY, write_tiny
from tests.models.support import forward, titan_model
from tests.pages import PAGES
from torchtitan_rl.batching.documents import Document, positions, segments
from torchtitan_rl.models.archs.registry import ARCHITECTURES, LACKING
from torchtitan_rl.models.cpu.attention import AttentionPlan
from torchtitan_rl.models.shards import trace_rows
from torchtitan_rl.models.spec import model_spec

DRAW = torch.Generator().manual_seed(0)
TOKENS = torch.randint(0, 271, (1, 60), generator=DRAW)
"""Without the token for padding, which in transformers has no gradient."""
PLACES = {
    "short": torch.arange(60).unsqueeze(0),
    # With gaps: rotations depend on distances, which must be long too.
    "long": torch.randperm(131072, generator=DRAW)[:60].sort().values.unsqueeze(0),
}
"""Positions of TOKENS."""


@pytest.fixture(scope="module", params=TINY)
def folder(request, tmp_path_factory):
    """The folder of a tiny model of each architecture in turn."""
    return write_tiny(request.param, tmp_path_factory.mktemp("archs") / request.param)


def hf_named(folder, model, tensors):
    """Tensors of a model's parameters under their HF names."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
    spec = model_spec(folder)
    return spec.state_dict_adapter(spec.model, str(folder)).to_hf(model.state_dict())


def test_it_computes_what_transformers_computes(folder):
    ours, theirs = titan_model(folder), AutoModelForCausalLM.from_pretrained(folder)
    whole = torch.ones_like(TOKENS)  # else transformers takes gaps for the ends of documents
    seen = []
    for name, places in PLACES.items():
        logits = ours(tokens=TOKENS, positions=places)
        expected = theirs(TOKENS, position_ids=places, attention_mask=whole).logits
        assert expected.std() > 0.5
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5, msg=name)
        seen.append(expected)
        logits.log_softmax(-1)[..., 7].sum().backward()
        expected.log_softmax(-1)[..., 7].sum().backward()
    assert (seen[0] - seen[1]).abs().max() > 0.05  # positions matter
    gradients = hf_named(folder, ours, {name: p.grad for name, p in ours.named_parameters()})
    compared = 0
    for name, parameter in theirs.named_parameters():
        if name in gradients:  # transformers 5 has all experts of a layer in one
            compared += 1
            difference = gradients[name] - parameter.grad
            assert difference.norm() <= 1e-4 * parameter.grad.norm() + 1e-6, name
    assert compared >= 18


def test_its_tensors_come_back_to_the_byte(folder):
    stored = load_file(folder / "model.safetensors")
    model = titan_model(folder)
    back = hf_named(folder, model, dict(model.named_parameters()))
    assert back.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(back[name], tensor), name


def test_every_row_of_every_parameter_is_published_once(folder):
    spec = model_spec(folder)
    traced = trace_rows(spec, spec.state_dict_adapter(spec.model, str(folder)))
    for name, parameter in titan_model(folder).named_parameters():
        rows = sorted(row for origin in traced[name] for row in origin.rows.tolist())
        assert rows == list(range(parameter.shape[0])), name


def test_shared_prompts_change_nothing(folder):
    """Two prompts of three samples each, and a document by itself, in a row."""
    model = titan_model(folder)
    row = segments([Document(9, (3, 5, 1)), Document(11), Document(6, (2, 2, 4))])
    tokens, places = TOKENS[:, : row[-1].stop], positions(row)
    with torch.no_grad():
        packed = model(tokens, places.unsqueeze(0), AttentionPlan(row))[0]
        for segment in row:
            trunk = range(segment.trunk.start, segment.trunk.stop) if segment.trunk else ()
            own = [*trunk, *range(segment.start, segment.stop)]
            alone = forward(model, tokens[:, own])[0]
            torch.testing.assert_close(
                packed[own[len(trunk) :]], alone[len(trunk) :], rtol=0, atol=1e-5
            )


def test_each_architecture_has_a_tiny_model_or_a_reason():
    assert {tiny["architectures"][0] for tiny in TINY.values()} == ARCHITECTURES.keys()
    assert not ARCHITECTURES.keys() & LACKING.keys()


def test_the_page_says_what_is_supported_and_what_lacks():
    page = PAGES["docs/models.md"]
    for name in ARCHITECTURES:
        assert f"| `{name}` | " in page
    rows = [f"| `{name}` | {reason} |" for name, reason in LACKING.items()]
    assert "\n".join(rows) in page
