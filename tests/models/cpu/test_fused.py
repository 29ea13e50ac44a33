"""Norm, rotation and SwiGLU with backward passes of their own, against what autograd makes of
torchtitan's."""

import pytest
import torch
import torch.nn.functional as F
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.nn_modules import RMSNorm

from torchtitan_rl.models.cpu.fused import FusedRMSNorm, FusedRoPE, rms_norm, swiglu


def drawn(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def compare(ours, theirs, *inputs, tolerance):
    """Values and gradients, by the same random weights of what comes out."""
    results = []
    for function in (ours, theirs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        out = torch.cat([o.flatten() for o in out]) if isinstance(out, tuple) else out
        grads = torch.autograd.grad((out * drawn(*out.shape, dtype=out.dtype)).sum(), leaves)
        results.append([out.detach(), *grads])
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


DTYPES = [(torch.float64, 1e-12), (torch.float32, 2e-5)]


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("shape", [(1, 7, 16), (5, 3, 8), (4, 6)])
def test_the_norm(shape, dtype, tolerance):
    x, weight = drawn(*shape, dtype=dtype), 1 + 0.3 * drawn(shape[-1], dtype=dtype)
    compare(
        lambda x, w: rms_norm(x, w, 1e-5),
        lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
        x,
        weight,
        tolerance=tolerance,
    )


def test_the_norm_of_nothing_is_nothing():
    x = torch.zeros(2, 4, requires_grad=True)
    out = rms_norm(x, torch.ones(4), 1e-6)
    out.sum().backward()
    assert out.tolist() == torch.zeros(2, 4).tolist()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_swiglu(dtype, tolerance):
    gate, up = 3 * drawn(2, 9, 12, dtype=dtype), drawn(2, 9, 13, dtype=dtype)[..., :12]
    compare(swiglu, lambda g, u: F.silu(g) * u, gate, up, tolerance=tolerance)


def test_the_norm_of_half_precision_is_torchtitans():
    config = {"normalized_shape": 16, "eps": 1e-5}
    ours = FusedRMSNorm(FusedRMSNorm.Config(**config)).bfloat16()
    theirs = RMSNorm(RMSNorm.Config(**config)).bfloat16()
    compare(ours, theirs, drawn(3, 16, dtype=torch.bfloat16), tolerance=0)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 0)], ids=str
)
def test_the_rotation(dtype, tolerance):
    query, key = drawn(1, 6, 4, 8, dtype=dtype), drawn(1, 6, 2, 8, dtype=dtype)
    angles = torch.outer(torch.tensor([0.0, 1, 2, 0, 1, 5]), torch.tensor([1.0, 0.3, 0.1, 0.01]))
    angles = torch.cat([angles, angles], -1)[None, :, None]
    cache = torch.cat([angles.cos(), angles.sin()], -1)
    compare(
        lambda q, k: FusedRoPE.apply_rotary_emb(q, k, cache),
        lambda q, k: CosSinRoPE.apply_rotary_emb(q, k, cache),
        query,
        key,
        tolerance=tolerance,
    )
