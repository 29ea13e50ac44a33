"""The norm with a backward pass of its own, against autograd of torch's."""

import pytest
import torch
import torch.nn.functional as F
from torchtitan.models.common.nn_modules import RMSNorm

from torchtitan_rl.models.cpu.norm import FusedRMSNorm, rms_norm


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


@pytest.mark.parametrize("width", [32, 128, 576])
def test_the_norm_rounds_no_more_than_the_plain_formula(width):
    """Errors of the scale are shared by a row, and tokens that depend on a row's scale by a
    thousandfold show them; with the plain formula trainer and generator are closer there."""
    x, weight = drawn(4000, width, dtype=torch.float32), 1 + 0.1 * drawn(width, dtype=torch.float32)
    plain = x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    assert torch.equal(rms_norm(x, weight, 1e-6), plain)


def test_the_norm_of_nothing_is_nothing():
    x = torch.zeros(2, 4, requires_grad=True)
    out = rms_norm(x, torch.ones(4), 1e-6)
    out.sum().backward()
    assert out.tolist() == torch.zeros(2, 4).tolist()
    assert torch.isfinite(x.grad).all()


def test_the_norm_of_half_precision_is_torchtitans():
    config = {"normalized_shape": 16, "eps": 1e-5}
    ours = FusedRMSNorm(FusedRMSNorm.Config(**config)).bfloat16()
    theirs = RMSNorm(RMSNorm.Config(**config)).bfloat16()
    compare(ours, theirs, drawn(3, 16, dtype=torch.bfloat16), tolerance=0)
