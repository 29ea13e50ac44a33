"""Norm, rotation and SwiGLU of a layer with backward passes written by hand: for a CPU.

Beside its matrix products a layer is many passes over memory, most of them in the backward pass
that autograd puts together, and it keeps what can be had again for one pass more. Tensors that are
cut over ranks (DTensor) take torchtitan's own way, and so do those in half precision, which these
passes would round in between.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.nn_modules import RMSNorm


class FusedRMSNorm(RMSNorm):
    """torchtitan's, in fewer passes."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    # torchtitan shards the argument by its name.
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.eps is not None and _whole(x) and _whole(self.weight):
            return rms_norm(x, self.weight, self.eps)
        return super().forward(x)


class FusedFeedForward(FeedForward):
    """torchtitan's, without keeping the product's left side."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.w1(x), self.w3(x)
        return self.w2(swiglu(gate, up) if _whole(gate) else F.silu(gate) * up)


class FusedRoPE(CosSinRoPE):
    """torchtitan's, in two passes in place of five."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    @staticmethod
    def apply_rotary_emb(
        query: torch.Tensor, key: torch.Tensor, rope_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not _whole(query):
            return CosSinRoPE.apply_rotary_emb(query, key, rope_cache)
        cos, sin = rope_cache.chunk(2, dim=-1)
        return rotate(query, cos, sin), rotate(key, cos, sin)


def _whole(tensor: torch.Tensor) -> bool:
    """Not cut over ranks, and in full precision."""
    return not isinstance(tensor, DTensor) and tensor.dtype in (torch.float32, torch.float64)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension.

    Example:
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0)
        tensor([[0.8485, 1.1314]])
    """
    return _RMSNorm.apply(x, weight, eps)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up."""
    return _SwiGLU.apply(gate, up)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the halves of the last dimension against each other: (a cos - b sin, b cos + a sin)."""
    return _Rotation.apply(x, cos, sin)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        # vector_norm makes no copy of x², as pow would
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """With n = x · scale: dx = scale · (w·g - n · mean(w·g·n)), dw = Σ g·n over the tokens."""
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        share = grad * normed
        mean = (share @ weight).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = (grad * weight).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_x, share.flatten(0, -2).sum(0), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = ctx.saved_tensors
        grad_up = F.silu(gate).mul_(grad)
        return torch.ops.aten.silu_backward(grad * up, gate), grad_up


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, +1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Back by the same angle."""
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1), None, None


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    out, half = x * cos, x.shape[-1] // 2
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return out
