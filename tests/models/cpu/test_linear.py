"""Layers that multiply by oneDNN and add to the gradient they have: torch's own results, to
rounding."""

import pytest
import torch
from torchtitan.models.common import Linear

from torchtitan_rl.models.cpu import products
from torchtitan_rl.models.cpu.linear import AccumulatingLinear
from torchtitan_rl.models.cpu.products import product


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def linear(kind: type[Linear], *, bias: bool = False) -> Linear:
    return kind(kind.Config(in_features=5, out_features=7, bias=bias))


ROWS = drawn(3, 2, 6, 5).unbind()


@pytest.mark.parametrize("large", [(0, 0), products.LARGE], ids=["oneDNN", "MKL"])
def test_microbatches_add_up_as_autograd_does_it(monkeypatch, large):
    monkeypatch.setattr(products, "LARGE", large)
    ours, theirs = linear(AccumulatingLinear), linear(Linear)
    ours.load_state_dict(theirs.state_dict())
    made: list[torch.Tensor] = []  # by autograd, for it to add
    ours.weight.register_hook(made.append)
    for value in ROWS:
        results = []
        for layer in (ours, theirs):
            leaf = value.clone().requires_grad_()
            out = layer(leaf)
            (out * drawn(*out.shape)).sum().backward()
            results.append((out, leaf.grad, layer.weight.grad))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)
    assert [gradient is not None for gradient in made] == [True, False, False]


def test_a_frozen_weight_gets_no_gradient():
    made, value = linear(AccumulatingLinear), ROWS[0].clone().requires_grad_()
    made.weight.requires_grad_(False)
    made(value).sum().backward()
    torch.testing.assert_close(value.grad, made.weight.sum(0).expand_as(value))
    assert made.weight.grad is None


def test_a_bias_is_left_to_torchtitan():
    made = linear(AccumulatingLinear, bias=True)
    made(ROWS[0]).sum().backward()
    assert made.bias.grad.tolist() == [12.0] * 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(7, 5, 3), (1, 1, 1), (64, 96, 33), (0, 4, 2), (3, 4, 0)])
def test_a_product_by_onednn_is_the_product(monkeypatch, shape, dtype):
    monkeypatch.setattr(products, "LARGE", (0, 0))
    rows, inner, columns = shape
    left, right = drawn(rows, inner).to(dtype), drawn(inner, columns).to(dtype)
    for a, b in ((left, right), (left.T.contiguous().T, right.T.contiguous().T)):
        out = product(a, b)
        assert out.dtype == dtype
        torch.testing.assert_close(out, left @ right)
