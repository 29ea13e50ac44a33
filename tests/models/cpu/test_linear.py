"""Layers that add to the gradient they have: the sums of autograd, in the place where they were."""

import torch
from torchtitan.models.common import Linear

from torchtitan_rl.models.cpu.linear import AccumulatingLinear


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def linear(kind: type[Linear], *, bias: bool = False) -> Linear:
    return kind(kind.Config(in_features=5, out_features=7, bias=bias))


ROWS = drawn(3, 2, 6, 5).unbind()


def test_microbatches_add_up_as_autograd_does_it() -> None:
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


def test_a_frozen_weight_gets_no_gradient() -> None:
    made, value = linear(AccumulatingLinear), ROWS[0].clone().requires_grad_()
    made.weight.requires_grad_(False)
    made(value).sum().backward()
    torch.testing.assert_close(value.grad, made.weight.sum(0).expand_as(value))
    assert made.weight.grad is None


def test_a_bias_is_left_to_torchtitan() -> None:
    made = linear(AccumulatingLinear, bias=True)
    made(ROWS[0]).sum().backward()
    assert made.bias.grad.tolist() == [12.0] * 7
