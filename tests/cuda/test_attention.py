"""Attention of a GPU over packed rows, with a stand-in for the kernel itself: FlashAttention's
published contract, computed on a CPU."""

import itertools

import pytest
import torch
from hypothesis import given, settings

from tests.cuda.pretend import pretend_gpus
from tests.models.cpu.test_attention import TABLE, close, drawn, naive, rows, visibility
from torchtitan_rl.batching.documents import Document, segments
from torchtitan_rl.models.cuda import attention
from torchtitan_rl.models.cuda.attention import PackedFlashAttention, try_attention, varlen_plan

CPU = torch.device("cpu")


def varlen(q, k, v, query_bounds, key_bounds, most_queries, most_keys, **options):
    """varlen_attn for causal sequences: the last query of each sees its last key."""
    assert options["window_size"] == (-1, 0)
    assert options["num_splits"] == 1
    assert options["enable_gqa"] == (q.shape[1] != k.shape[1])
    assert query_bounds.dtype == key_bounds.dtype == torch.int32
    assert most_queries == query_bounds.diff().max()
    assert most_keys == key_bounds.diff().max()
    assert len(q) == query_bounds[-1]
    assert len(k) == key_bounds[-1]
    outs = []
    bounds = zip(
        *(b[i:].tolist() for b in (query_bounds, key_bounds) for i in (0, 1)), strict=False
    )
    for start, stop, first, last in bounds:
        size = stop - start, last - first
        mask = torch.ones(size, dtype=torch.bool).tril(size[1] - size[0])
        outs.append(naive(q[start:stop], k[first:last], v[first:last], mask, options["scale"]))
    return torch.cat(outs)


@pytest.fixture(autouse=True)
def _kernel(monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", varlen)


@pytest.fixture(autouse=True)
def _any_precision(monkeypatch):
    """Differences are then those of the masks alone."""
    monkeypatch.setattr(attention, "HALF", (torch.float64,))


def attend(row, q, k, v, scale=None):
    with pretend_gpus((9, 0)):
        module = PackedFlashAttention.Config().build()
    plan = varlen_plan(row, CPU)
    out = module(*(t.unsqueeze(0) for t in (q, k, v)), attention_masks=plan, scale=scale)
    return out.squeeze(0)


def check_against_the_mask(documents, heads=(6, 2), scale=None):
    inputs, grad = drawn(sum(d.tokens for d in documents), heads)
    out = attend(segments(documents), *inputs, scale=scale)
    wanted = naive(*inputs, visibility(documents), scale)
    close(
        (out, *torch.autograd.grad(out, inputs, grad)),
        (wanted, *torch.autograd.grad(wanted, inputs, grad)),
        atol=1e-12,
    )


@pytest.mark.parametrize("heads", [(6, 2), (4, 4)], ids=str)
@pytest.mark.parametrize("documents", TABLE, ids=str)
def test_values_and_gradients_are_those_of_a_masked_softmax(documents, heads):
    check_against_the_mask(documents, heads)


@settings(deadline=None, max_examples=30)
@given(documents=rows)
def test_values_and_gradients_of_any_row_are_those_of_a_masked_softmax(documents):
    check_against_the_mask(documents, scale=0.5)


def test_keys_are_gathered_only_where_a_prompt_is_shared():
    assert varlen_plan(segments([Document(3), Document(2)]), CPU).keys is None
    plan = varlen_plan(segments([Document(2, (1, 2)), Document(1)]), CPU)
    assert plan.keys.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4, 5]
    assert plan.query_bounds.tolist() == [0, 2, 3, 5, 6]
    assert plan.key_bounds.tolist() == [0, 2, 5, 9, 10]
    assert (plan.most_queries, plan.most_keys) == (2, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_gets_half_precision_and_the_model_what_it_had(monkeypatch, dtype):
    monkeypatch.undo()
    seen = []

    def kernel(q, k, v, *args, **options):
        seen.extend((q.dtype, k.dtype, v.dtype))
        return q

    monkeypatch.setattr(attention, "varlen_attn", kernel)
    inputs, _ = drawn(5, dtype=dtype)
    assert attend(segments([Document(5)]), *inputs).dtype == dtype
    assert set(seen) == {torch.bfloat16}


def test_a_kernel_that_lines_up_the_beginnings_is_refused(monkeypatch):
    with pretend_gpus((9, 0)):
        try_attention(CPU)

        def wrong(q, k, v, query_bounds, key_bounds, *rest, **options):
            """Sees, of the keys before a branch, as many as the branch has tokens."""
            flipped = key_bounds.tolist()
            parts = [
                t[first:last].roll(1, 0)
                for t in (k, v)
                for first, last in itertools.pairwise(flipped)
            ]
            k, v = torch.cat(parts[: len(parts) // 2]), torch.cat(parts[len(parts) // 2 :])
            return varlen(q, k, v, query_bounds, key_bounds, *rest, **options)

        monkeypatch.setattr(attention, "varlen_attn", wrong)
        with pytest.raises(RuntimeError, match=r"attention on this GPU \(FA2\) is off by"):
            try_attention(CPU)
