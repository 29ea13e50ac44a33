"""Layers that add to the gradient they have: what autograd adds up, in the place where it was."""

import pytest
import torch
from torchtitan.models.common import Embedding, Linear

from torchtitan_rl.models.cpu.accumulate import AccumulatingEmbedding, AccumulatingLinear


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def linear(kind, **options):
    return kind(kind.Config(in_features=5, out_features=7, **options))


def embedding(kind):
    return kind(kind.Config(num_embeddings=9, embedding_dim=4))


ROWS = drawn(3, 2, 6, 5).unbind()
TOKENS = torch.tensor([[[1, 1, 8]], [[0, 1, 2]], [[8, 8, 8]]]).unbind()


@pytest.mark.parametrize(
    ("make", "ours", "theirs", "inputs"),
    [
        (linear, AccumulatingLinear, Linear, ROWS),
        (embedding, AccumulatingEmbedding, Embedding, TOKENS),
    ],
)
def test_microbatches_add_up_as_autograd_does_it(make, ours, theirs, inputs):
    ours, theirs = make(ours), make(theirs)
    ours.load_state_dict(theirs.state_dict())
    made = []  # by autograd, for it to add
    ours.weight.register_hook(made.append)
    for value in inputs:
        leaves = []
        for layer in (ours, theirs):
            leaf = value.clone().requires_grad_(value.is_floating_point())
            out = layer(leaf)
            (out * drawn(*out.shape)).sum().backward()
            leaves.append((out, leaf.grad, layer.weight.grad))
        for one, other in zip(*leaves, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other)
    assert [gradient is not None for gradient in made] == [True, False, False]


@pytest.mark.parametrize("made", [linear(AccumulatingLinear), embedding(AccumulatingEmbedding)])
def test_a_frozen_weight_gets_no_gradient(made):
    value = ROWS[0].clone().requires_grad_() if isinstance(made, Linear) else TOKENS[0]
    made.weight.requires_grad_(False)
    out = made(value)
    if out.requires_grad:
        out.sum().backward()
        torch.testing.assert_close(value.grad, made.weight.sum(0).expand_as(value))
    assert made.weight.grad is None
    assert out.requires_grad == isinstance(made, Linear)


def test_a_bias_is_torchtitans_affair():
    made = linear(AccumulatingLinear, bias=True)
    made(ROWS[0]).sum().backward()
    assert made.bias.grad.tolist() == [12.0] * 7
