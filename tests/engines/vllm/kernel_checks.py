"""Patched functions of vLLM against its own plain ones; called where vLLM may be imported."""

import logging
from unittest.mock import patch

import torch
import vllm
from vllm import ir
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.layernorm import RMSNorm

from torchtitan_rl.engines.vllm import cpu
from torchtitan_rl.engines.vllm.cpu.norms import CpuRMSNorm

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def check_other_version() -> None:
    """Another vLLM is left as it comes, and the log says so; before the patches are applied."""
    logging.basicConfig(level=logging.WARNING)
    with patch.object(vllm, "__version__", "0.33.0"):
        cpu.apply()
        assert not op_registry_oot
        assert not cpu.is_active("direct_load")
    cpu.apply.cache_clear()
    cpu._version_is_known.cache_clear()


def check_kernels() -> None:
    """Patched functions compute what vLLM's own do."""
    for dtype in TOLERANCE:
        for width in (64, 40, 12):  # the last two are not the kernels'
            _check_norms(torch.randn(5, 2 * width, dtype=dtype))


def check_model(model: torch.nn.Module) -> None:
    """The model that was built has the patched norm."""
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    assert {type(norm) for norm in norms} == {CpuRMSNorm}


def _check_norms(x: torch.Tensor) -> None:
    left = x[:, : x.shape[-1] // 2]  # q and k are such slices
    weight = torch.randn(left.shape[-1], dtype=x.dtype)
    norm = CpuRMSNorm.__new__(CpuRMSNorm)
    torch.nn.Module.__init__(norm)
    norm.weight = torch.nn.Parameter(weight)
    norm.has_weight = norm.pass_weight = norm.pass_weight_add = True
    norm.variance_epsilon, norm.variance_size_override = 1e-5, None
    _close(norm.forward_native(left), ir.ops.rms_norm.impls["native"].impl_fn(left, weight, 1e-5))
    # In place, so each gets copies of its own.
    wanted = ir.ops.fused_add_rms_norm.impls["native"].impl_fn(
        left.clone(), left.clone(), weight, 1e-5
    )
    for one, other in zip(norm.forward_native(left.clone(), left.clone()), wanted, strict=True):
        _close(one, other)


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
