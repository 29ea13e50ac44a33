"""vLLM on a CPU: its compiled norms, which it chooses on GPUs only, in place of chains of small
torch calls; and a sampler that does nothing for a token that nobody asks for.

Imported in every process that has a part of the model, before it is built. For vLLM 0.32.
"""

from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.platforms import current_platform

# Else helpers are compiled when they are first used, for 4-24 s: before the engine's process
# imports what has them. (Where several processes share a model, vLLM has imported some already.)
type(current_platform).simple_compile_backend = "eager"
# Attention is an operator of torch's, so that graphs can be cut there. Nothing is compiled here:
# it is called as a function, which takes less time.
type(current_platform).opaque_attention_op = classmethod(lambda _: False)

# ruff: noqa: E402
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from torchtitan_rl.engines.vllm.cpu.gloo import share_one_loop

VECTOR = 16
"""Elements that a kernel takes at a time, at most: it refuses rows of another multiple."""

current_platform.import_kernels()
share_one_loop()


@RMSNorm.register_oot
class CpuRMSNorm(RMSNorm):
    """The norm, and the sum before it, in one pass."""

    def forward_native(
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if not self._is_plain(x, residual):
            return super().forward_native(x, residual)
        if residual is not None:
            torch.ops._C.fused_add_rms_norm(x, residual, self.weight, self.variance_epsilon)
            return x, residual
        x = x.contiguous()  # q and k are slices of one tensor, and the kernel knows no strides
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, self.weight, self.variance_epsilon)
        return out

    def _is_plain(self, x: Tensor, residual: Tensor | None) -> bool:
        known = self.has_weight and self.variance_size_override is None
        if not known or x.shape[-1] % VECTOR or self.weight.dtype != x.dtype:
            return False
        return residual is None or (x.is_contiguous() and residual.is_contiguous())


@SiluAndMul.register_oot
class CpuSiluAndMul(SiluAndMul):
    """SwiGLU's product in two passes of torch: vLLM's kernel takes three times as long."""

    def forward_native(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


# ---- sampling ---------------------------------------------------------------------------------

SEEDS_AHEAD = 32
"""Drawn at once for one request."""
_ahead: WeakKeyDictionary[torch.Generator, list[int]] = WeakKeyDictionary()


def next_seed(generator: torch.Generator) -> int:
    """The seed of a request's next token: what vLLM draws from the request's generator one by one,
    which for a batch takes longer than to sample it, is drawn ahead here."""
    ahead = _ahead.get(generator)
    if not ahead:
        drawn = torch.randint(0, 2**31, (SEEDS_AHEAD,), generator=generator, dtype=torch.long)
        _ahead[generator] = ahead = drawn.tolist()[::-1]
    return ahead.pop()


def sample(
    self: TopKTopPSampler,
    logits: Tensor,
    generators: dict[int, torch.Generator],
    k: Tensor | None,
    p: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """[requests] tokens, those of vLLM's own sampler, and logprobs [requests, vocab]."""
    if self.use_fp64_gumbel or self.logprobs_mode != "processed_logprobs":
        return _vllm_sample(self, logits, generators, k, p)
    logits = apply_top_k_top_p(logits, k, p)
    seeds = torch.randint(0, 2**31, (len(logits),), dtype=torch.long).tolist()
    for row, generator in generators.items():
        seeds[row] = next_seed(generator)
    tokens = torch.ops._C.fused_gumbel_argmax(logits.float(), torch.tensor(seeds, dtype=torch.long))
    return tokens, logits.log_softmax(dim=-1, dtype=torch.float32)


def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """Of the sampled tokens alone; vLLM would also rank each among the whole vocabulary."""
    if num_logprobs:
        return _vllm_gather_logprobs(logprobs, num_logprobs, token_ids)
    token_ids = token_ids.unsqueeze(-1)
    ranks = torch.zeros(len(token_ids), dtype=torch.long)
    return LogprobsTensors(token_ids.to(torch.int32), logprobs.gather(-1, token_ids), ranks)


_vllm_sample, TopKTopPSampler.forward_cpu = TopKTopPSampler.forward_cpu, sample
_vllm_gather_logprobs = Sampler.gather_logprobs
Sampler.gather_logprobs = staticmethod(gather_logprobs)
