"""vLLM's compiled CPU kernels against its own plain versions; called where vLLM may be imported."""

from types import SimpleNamespace

import torch
from vllm import ir
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm

from torchtitan_rl.engines.vllm.cpu import sampler as own
from torchtitan_rl.engines.vllm.cpu.norms import CpuRMSNorm
from torchtitan_rl.engines.vllm.cpu.swiglu import CpuSiluAndMul

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def check_kernels() -> None:
    """They compute what vLLM does without."""
    for dtype in TOLERANCE:
        for width in (64, 40, 12):  # the last two are not the kernels'
            _check_norms(torch.randn(5, 2 * width, dtype=dtype))
            _check_swiglu(torch.randn(5, 2 * width, dtype=dtype))
            _check_swiglu(torch.randn(5, 4 * width, dtype=dtype)[:, : 2 * width])  # has strides
    for seeded in ([], [0, 2], [0, 1, 2, 3]):
        _check_sampler(seeded)
    _check_sampler([1, 3], k=torch.tensor([5, 50, 2, 9]), p=torch.tensor([0.5, 1.0, 0.9, 1.0]))


def check_model(model: torch.nn.Module) -> None:
    """The model that was built uses them."""
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    assert {type(norm) for norm in norms} == {CpuRMSNorm}
    assert any(isinstance(module, CpuSiluAndMul) for module in model.modules())


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


def _check_sampler(
    seeded: list[int], k: torch.Tensor | None = None, p: torch.Tensor | None = None
) -> None:
    """Token by token what vLLM's own sampler draws, for more tokens than seeds are drawn ahead, of
    requests that change rows."""
    drawn = []
    for forward in (own.sample, own.vllm_sample):
        torch.manual_seed(1)
        sampler = SimpleNamespace(use_fp64_gumbel=False, logprobs_mode="processed_logprobs")
        generators = {row: torch.Generator().manual_seed(row) for row in seeded}
        logits = torch.randn(own.SEEDS_AHEAD + 9, 4, 50, generator=torch.Generator())
        steps = []
        for step in logits:
            steps.append(forward(sampler, step.clone(), generators, k, p))
            generators = {(row + 1) % 4: generator for row, generator in generators.items()}
        drawn.append(steps)
    for (tokens, logprobs), (own_tokens, own_logprobs) in zip(*drawn, strict=True):
        assert tokens.tolist() == own_tokens.tolist()
        _close(logprobs, own_logprobs)
        gathered = own.gather_logprobs(logprobs, 0, tokens.long())
        whole = own.vllm_gather_logprobs(logprobs, 0, tokens.long())
        assert torch.equal(gathered.logprob_token_ids, whole.logprob_token_ids)
        assert torch.equal(gathered.logprobs, whole.logprobs)


def _check_swiglu(x: torch.Tensor) -> None:
    _close(CpuSiluAndMul.forward_native(None, x), SiluAndMul.forward_native(x))


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
