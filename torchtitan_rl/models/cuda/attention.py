"""Attention over packed rows on a GPU: one call of FlashAttention, every document for itself.

Samples that share a prompt, the branches of a trunk, attend to its one copy: a branch is a sequence
with more keys than queries, its trunk's before its own, and FlashAttention lines up the ends of
queries and keys. So the keys are gathered once more for each branch, and nothing else is computed
twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.nn.attention.varlen import varlen_attn
from torchtitan.protocols.module import Module

from torchtitan_rl.batching.documents import Document, Segment, segments
from torchtitan_rl.platform.flash_attention import BUILT_IN, activate_kernel

HALF = (torch.bfloat16, torch.float16)
"""Number types that FlashAttention computes in."""


class VarlenPlan(NamedTuple):
    """The sequences of a row for one call of the kernel; made once, used by every layer."""

    query_bounds: torch.Tensor
    """[sequences + 1] where each sequence's queries begin in the row; the last entry is its end."""
    key_bounds: torch.Tensor
    """[sequences + 1] the same of the keys, in the order of `keys`."""
    most_queries: int
    most_keys: int
    keys: torch.Tensor | None
    """[keys] where each key is in the row; None: keys are where the queries are."""


def varlen_plan(row: Sequence[Segment], device: torch.device | str) -> VarlenPlan:
    """The plan for a row, on its device. Everything is known on the host: nothing waits for it."""
    row = [segment for segment in row if segment.length]
    seen = [(s.trunk, s) if s.trunk and s.trunk.length else (s,) for s in row]
    queries = [segment.length for segment in row]
    keys = [sum(part.length for part in parts) for parts in seen]
    shared = keys != queries
    places = [torch.arange(p.start, p.stop) for parts in seen for p in parts] if shared else []
    return VarlenPlan(
        query_bounds=_bounds(queries, device),
        key_bounds=_bounds(keys, device),
        most_queries=max(queries, default=0),
        most_keys=max(keys, default=0),
        keys=torch.cat(places).to(device, non_blocking=True) if shared else None,
    )


def _bounds(lengths: Sequence[int], device: torch.device | str) -> torch.Tensor:
    ends = list(accumulate(lengths, initial=0))
    return torch.tensor(ends, dtype=torch.int32).to(device, non_blocking=True)


class PackedFlashAttention(Module):
    """torchtitan's inner attention, for one packed row and the plan of its documents.

    In place of torchtitan 0.3's VarlenAttention, which cannot share prompts, and asks for a kernel
    by the GPU alone, whether or not it is installed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()
        # One split of the keys for each query: which number FlashAttention 2 would choose depends
        # on the other rows, and what it computes then on the choice.
        self._splits = 1 if activate_kernel() == BUILT_IN else None

    # torchtitan shards the arguments by their names.
    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: VarlenPlan,
        scale: float | None = None,
        **_: Any,
    ) -> torch.Tensor:
        dtype = q_BLNH.dtype
        half = dtype if dtype in HALF else torch.bfloat16
        q, k, v = (t.squeeze(0).to(half) for t in (q_BLNH, k_BLNH, v_BLNH))
        plan = attention_masks
        if plan.keys is not None:
            k, v = (t.index_select(0, plan.keys) for t in (k, v))
        out = varlen_attn(
            q,
            k,
            v,
            plan.query_bounds,
            plan.key_bounds,
            plan.most_queries,
            plan.most_keys,
            scale=scale,
            window_size=(-1, 0),  # causal
            enable_gqa=q.shape[1] != k.shape[1],
            num_splits=self._splits,
        )
        assert isinstance(out, torch.Tensor)  # its log-sum-exp was not asked for
        return out.unsqueeze(0).to(dtype)


TRIED = (Document(3, (2, 4)), Document(5), Document(2, (1,)))
"""A row that `try_attention` computes: prompts that are shared and one that is not."""


def try_attention(device: torch.device) -> None:
    """Compare the kernel with a masked softmax on a small row, values and gradients; raises
    RuntimeError if they differ: training on would teach something else than what was sampled."""
    row = segments(TRIED)
    tokens = row[-1].stop
    draw = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, tokens, heads, 64, generator=draw).to(device) for heads in (4, 2, 2, 4)
    )
    attend, plan = PackedFlashAttention.Config().build(), varlen_plan(row, device)
    mask = _visible(row).to(device)

    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (t.repeat_interleave(2, dim=2) for t in (k, v))
        scores = torch.einsum("bqnh,bknh->bnqk", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
        return torch.einsum("bnqk,bknh->bqnh", weights, v)

    def with_gradients(function: Any) -> list[torch.Tensor]:
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad)]

    found = with_gradients(lambda *qkv: attend(*qkv, attention_masks=plan))
    for one, other in zip(found, with_gradients(masked), strict=True):
        error = float((one - other).abs().max())
        if not error <= 0.05:  # bf16 has 8 bits; another mask would differ by about 1
            raise RuntimeError(
                f"attention on this GPU ({activate_kernel()}) is off by {error:.3g} on a small "
                "row: report it with the output of `torchtitan-rl doctor`"
            )


def _visible(row: Sequence[Segment]) -> torch.Tensor:
    """[tokens, tokens] True where a token attends to another."""
    visible = torch.zeros(row[-1].stop, row[-1].stop, dtype=torch.bool)
    for s in row:
        visible[s.start : s.stop, s.start : s.stop] = torch.ones(s.length, s.length).tril().bool()
        if s.trunk:
            visible[s.start : s.stop, s.trunk.start : s.trunk.stop] = True
    return visible
