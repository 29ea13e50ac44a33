"""Attention over packed rows on a CPU: every document for itself, shared trunks once.

A row is never attended to as a whole, so its square is never paid for. Segments of like length run
as one batch of the causal flash kernel; the branches' attention to their trunk is a second call,
without a mask. The two are merged by their log-sum-exp, and the kernel's own backward pass, given
the merged output and log-sum-exp, returns each call's exact share of the gradient.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torchtitan.protocols.module import Module

from torchtitan_rl.batching.documents import Segment

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


ALONE_FROM = 256
"""Segments of this length keep the kernel busy by themselves."""
MANY = 16
"""So many segments of one length are worth a call of their own."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Segments of like length that attend to themselves in one call, padded on the right: behind
    the last key that a causal query sees."""

    index: torch.Tensor | tuple[None, slice]
    """[segments, longest] where their tokens are in the row, anywhere for padding; of one segment
    alone a slice, which copies nothing."""
    real: torch.Tensor | None
    """[segments, longest] False at padding; None when there is none."""

    @classmethod
    def of(cls, members: Sequence[Segment]) -> "Bucket":
        if len(members) == 1:
            return cls((None, slice(members[0].start, members[0].stop)), None)
        offsets = torch.arange(max(s.length for s in members))
        real = offsets < torch.tensor([[s.length] for s in members])
        index = (offsets + torch.tensor([[s.start] for s in members])) * real
        return cls(index, None if real.all() else real)

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, ...] to [segments, heads, longest, ...]."""
        taken = values[self.index]
        if self.real is not None:
            taken[~self.real] = 0
        return taken.transpose(1, 2)

    def put(self, values: torch.Tensor, taken: torch.Tensor) -> None:
        """The way back, into `values`."""
        taken = taken.transpose(1, 2)
        if self.real is None:
            values[self.index] = taken
        else:
            assert isinstance(self.index, torch.Tensor)
            values[self.index[self.real]] = taken[self.real]


class AttentionPlan:
    """The kernel calls for a row; made once, used by every layer."""

    def __init__(self, row: Sequence[Segment]) -> None:
        self.buckets = [Bucket.of(members) for members in _of_like_length(row)]
        self.to_trunks = list(_branches_and_trunk(row))


class PackedAttention(Module):
    """torchtitan's inner attention, for one packed row and the plan of its documents."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    # torchtitan shards the arguments by their names.
    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: AttentionPlan | None = None,
        scale: float | None = None,
        **_: Any,
    ) -> torch.Tensor:
        if attention_masks is None:  # every row is a document
            q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
            return out.transpose(1, 2)
        q, k, v = (t.squeeze(0) for t in (q_BLNH, k_BLNH, v_BLNH))
        return packed_attention(q, k, v, attention_masks, scale=scale).unsqueeze(0)


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """[tokens, heads, head size] each, k and v of fewer heads where queries share them."""
    return _Packed.apply(q, k, v, plan, scale)


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan: AttentionPlan, scale: float | None):
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        for bucket in plan.buckets:
            parts = _forward(*map(bucket.take, (q, k, v)), 0.0, True, scale=scale)
            for values, part in zip((out, lse), parts, strict=True):
                bucket.put(values, part)
        for branches, trunk in plan.to_trunks:
            seen, seen_lse = _forward(
                *map(_as_batch, (q[branches], k[trunk], v[trunk])), 0.0, False, scale=scale
            )
            _merge(out[branches], lse[branches], _from_batch(seen), _from_batch(seen_lse))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(t) for t in (q, k, v)]
        for bucket in ctx.plan.buckets:
            taken = map(bucket.take, (grad_out, q, k, v, out, lse))
            for grad, part in zip(
                grads, _backward(*taken, 0.0, True, scale=ctx.scale), strict=True
            ):
                bucket.put(grad, part)
        for branches, trunk in ctx.plan.to_trunks:
            taken = map(
                _as_batch,
                (grad_out[branches], q[branches], k[trunk], v[trunk], out[branches], lse[branches]),
            )
            parts = _backward(*taken, 0.0, False, scale=ctx.scale)
            for grad, where, part in zip(grads, (branches, trunk, trunk), parts, strict=True):
                grad[where] += _from_batch(part)
        return *grads, None, None


def _merge(
    out: torch.Tensor, lse: torch.Tensor, seen: torch.Tensor, seen_lse: torch.Tensor
) -> None:
    """Into `out` and `lse`, softmax over some keys, what was seen of others."""
    both = torch.logaddexp(lse, seen_lse)
    out.mul_((lse - both).exp_().unsqueeze(-1)).add_(seen * (seen_lse - both).exp_().unsqueeze(-1))
    lse.copy_(both)


def _as_batch(values: torch.Tensor) -> torch.Tensor:
    return values.transpose(0, 1).unsqueeze(0)


def _from_batch(values: torch.Tensor) -> torch.Tensor:
    return values.squeeze(0).transpose(0, 1)


def _of_like_length(row: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Buckets of segments of which the shortest is not much shorter than the longest."""
    bucket: list[Segment] = []
    by_length = sorted((s for s in row if s.length), key=lambda s: -s.length)
    for length, same in groupby(by_length, key=lambda s: s.length):
        members = list(same)
        if len(members) >= MANY and length < ALONE_FROM:
            yield members  # by themselves they need no padding
            continue
        for segment in members:
            # Padding costs by the square; a call of the kernel costs as much as a few tokens.
            longest = bucket[0].length if bucket else 0
            if bucket and (longest >= ALONE_FROM or length < longest * 0.9 - 4):
                yield bucket
                bucket = []
            bucket.append(segment)
    if bucket:
        yield bucket


def _branches_and_trunk(row: Sequence[Segment]) -> Iterator[tuple[slice, slice]]:
    """For each trunk with branches: where they are. All branches of one follow it."""
    branches = [s for s in row if s.trunk and s.length]
    for trunk, grown in groupby(branches, key=lambda s: s.trunk):
        assert trunk is not None
        *_, last = grown
        yield slice(trunk.stop, last.stop), slice(trunk.start, trunk.stop)
