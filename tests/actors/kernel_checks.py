"""vLLM's compiled CPU kernels against its own plain versions; called where vLLM may be imported."""

import torch
from vllm import ir
from vllm.model_executor.layers.activation import SiluAndMul

from torchtitan_rl.actors import vllm_cpu

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def check_kernels() -> None:
    """The engine that was built uses them, and they compute what vLLM does without."""
    for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
        assert op.get_priority()[0] == vllm_cpu.PROVIDER, op.get_priority()
    for dtype in TOLERANCE:
        for width in (64, 40, 12):  # the last two are not the kernels'
            _check_norms(torch.randn(5, 2 * width, dtype=dtype))
            _check_swiglu(torch.randn(5, 2 * width, dtype=dtype))
            _check_swiglu(torch.randn(5, 4 * width, dtype=dtype)[:, : 2 * width])  # has strides


def _check_norms(x: torch.Tensor) -> None:
    left = x[:, : x.shape[-1] // 2]  # q and k are such slices
    weight = torch.randn(left.shape[-1], dtype=x.dtype)
    rms_norm, added = ir.ops.rms_norm, ir.ops.fused_add_rms_norm
    plain = rms_norm.impls["native"].impl_fn(left, weight, 1e-5)
    _close(rms_norm(left, weight, 1e-5), plain)
    # In place, so each gets copies of its own.
    wanted = added.impls["native"].impl_fn(left.clone(), left.clone(), weight, 1e-5)
    for one, other in zip(added(left.clone(), left.clone(), weight, 1e-5), wanted, strict=True):
        _close(one, other)


def _check_swiglu(x: torch.Tensor) -> None:
    _close(vllm_cpu.CpuSiluAndMul.forward_native(None, x), SiluAndMul.forward_native(x))


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
