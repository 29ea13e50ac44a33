"""Patched functions of vLLM against its own plain ones; called where vLLM may be imported."""

import torch
from vllm import ir
from vllm.model_executor.layers.layernorm import RMSNorm

from torchtitan_rl.engines.vllm.cpu import no_ranks
from torchtitan_rl.engines.vllm.cpu.norms import CpuRMSNorm

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def check_kernels() -> None:
    """Patched functions compute what vLLM's own do."""
    for dtype in TOLERANCE:
        for width in (64, 40, 12):  # the last two are not the kernels'
            _check_norms(torch.randn(5, 2 * width, dtype=dtype))
    _check_logprobs()


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


def _check_logprobs() -> None:
    logprobs, tokens = torch.randn(4, 50).log_softmax(-1), torch.tensor([0, 7, 49, 7])
    gathered = no_ranks.gather_logprobs(logprobs, 0, tokens)
    whole = no_ranks.vllm_gather_logprobs(logprobs, 0, tokens)
    assert torch.equal(gathered.logprob_token_ids, whole.logprob_token_ids)
    assert torch.equal(gathered.logprobs, whole.logprobs)


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
