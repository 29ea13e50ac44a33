"""Linear layers by `products`, whose gradients are added up in place.

Autograd makes the gradient of every microbatch anew, and then adds it to that of the ones before.
Weights that are DTensors in the forward pass, and layers that are compiled, are left to torchtitan;
FSDP, which takes the gradient of every microbatch away, leaves nothing to add to.
`torch.autograd.grad` by a weight that has a gradient is of no use with these layers: the result is
in `.grad`.

Gain of a whole step: see `products`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear

from torchtitan_rl.models.cpu.products import product


class AccumulatingLinear(Linear):
    """torchtitan's Linear; without a bias its gradient is added in place."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    # torchtitan shards the argument by its name.
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        plain = self.bias is not None or isinstance(self.weight, DTensor)
        if plain or not self.weight.is_leaf or torch.compiler.is_compiling():
            return super().forward(input)
        return _Linear.apply(input, self.weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.weight = weight
        return product(x.flatten(0, -2), weight.T).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        grads = grad.flatten(0, -2)
        grad_x = product(grads, weight).unflatten(0, grad.shape[:-1]) if of_x else None
        if not of_weight:
            return grad_x, None
        rows = x.flatten(0, -2)
        if ctx.weight.grad is None:
            return grad_x, product(grads.T, rows)
        ctx.weight.grad.add_(product(grads.T, rows))
        return grad_x, None
