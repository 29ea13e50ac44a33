"""Linear layers by oneDNN products, whose gradients are added up in place.

Autograd makes the gradient of every microbatch anew, and then adds it to that of the ones before:
more passes over as much memory as the model has. Weights that are DTensors in the forward pass are
left to torchtitan, and FSDP, which takes the gradient of every microbatch away, leaves nothing to
add to. `torch.autograd.grad` by a weight that has a gradient is of no use with these layers: the
result is in `.grad`.

Gain of a whole step: -4 % (tiny), 3 % (135M) (two cores of an AMD EPYC with AVX-512, torch 2.13).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear

from torchtitan_rl.models.cpu.products import times_transposed


class AccumulatingLinear(Linear):
    """torchtitan's Linear; without a bias its gradient is added in place."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    # torchtitan shards the argument by its name.
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.bias is None and self.weight.is_leaf and not isinstance(self.weight, DTensor):
            return _Linear.apply(input, self.weight)
        return super().forward(input)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.weight = weight
        return times_transposed(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        grads = grad.flatten(0, -2)
        grad_x = None
        if of_x:
            grad_x = times_transposed(grads, weight.T).unflatten(0, grad.shape[:-1])
        if not of_weight:
            return grad_x, None
        rows = x.flatten(0, -2)
        if ctx.weight.grad is None:
            return grad_x, grads.T @ rows
        ctx.weight.grad.addmm_(grads.T, rows)
        return grad_x, None
