"""A sampler for vLLM on a CPU that does nothing for a token that nobody asks for.

Seeds of a request's next tokens are drawn ahead, many at once, and the rank of a sampled token
among the vocabulary is left out. Tokens and logprobs are those of vLLM's own sampler.

Gain: GAIN_sampler (vLLM 0.32.0, two cores of an AMD EPYC with AVX-512).
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

SEEDS_AHEAD = 32
"""Seeds drawn at once for one request."""
_ahead: WeakKeyDictionary[torch.Generator, list[int]] = WeakKeyDictionary()
vllm_sample: Any = TopKTopPSampler.forward_cpu
vllm_gather_logprobs: Any = Sampler.gather_logprobs


def next_seed(generator: torch.Generator) -> int:
    """The seed of a request's next token, from its generator. vLLM draws seeds one by one, which
    for a batch takes longer than to sample it."""
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
    """[requests] tokens and [requests, vocab] logprobs."""
    if self.use_fp64_gumbel or self.logprobs_mode != "processed_logprobs":
        return vllm_sample(self, logits, generators, k, p)
    logits = apply_top_k_top_p(logits, k, p)
    seeds = torch.randint(0, 2**31, (len(logits),), dtype=torch.long).tolist()
    for row, generator in generators.items():
        seeds[row] = next_seed(generator)
    tokens = torch.ops._C.fused_gumbel_argmax(logits.float(), torch.tensor(seeds, dtype=torch.long))
    return tokens, logits.log_softmax(dim=-1, dtype=torch.float32)


def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """Logprobs of the sampled tokens; their ranks are left at 0."""
    if num_logprobs:
        return vllm_gather_logprobs(logprobs, num_logprobs, token_ids)
    token_ids = token_ids.unsqueeze(-1)
    ranks = torch.zeros(len(token_ids), dtype=torch.long)
    return LogprobsTensors(token_ids.to(torch.int32), logprobs.gather(-1, token_ids), ranks)


def apply() -> None:
    """Have vLLM sample this way."""
    current_platform.import_kernels()
    TopKTopPSampler.forward_cpu = sample
    Sampler.gather_logprobs = staticmethod(gather_logprobs)
