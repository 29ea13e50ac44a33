"""Attention over packed rows: what a mask over the whole row would give, without its square."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.batching.documents import Document, segments
from torchtitan_rl.models.cpu.attention import AttentionPlan, PackedAttention, packed_attention
from torchtitan_rl.platform.switches import VARIABLE

GQA = (6, 2)
TABLE = [
    [Document(1)],
    [Document(7)],
    [Document(1), Document(1), Document(1)],
    [Document(5), Document(3), Document(40), Document(1)],
    # Alike enough for one call, with padding.
    [Document(50), Document(48), Document(50), Document(46)],
    [Document(3, (2,))],
    [Document(3, (2, 4))],
    [Document(1, (1, 1, 1))],
    [Document(2, (30, 1, 29)), Document(4), Document(33, (3, 3)), Document(5, (1,))],
]
rows = st.lists(
    st.builds(
        Document,
        st.integers(1, 24),
        st.lists(st.integers(1, 12), max_size=4).map(tuple),
    ),
    min_size=1,
    max_size=5,
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Rows this small take longer to share out than to compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def visibility(documents):
    """[tokens, tokens] True where a token sees another, by the book."""
    tokens = [
        (number, branch, first + offset)
        for number, document in enumerate(documents)
        for branch, length in enumerate((document.trunk, *document.branches))
        for first in [document.trunk if branch else 0]
        for offset in range(length)
    ]
    number, branch, position = torch.tensor(tokens).unbind(1)
    same_path = (branch == 0) | (branch == branch[:, None])
    return (number == number[:, None]) & same_path & (position <= position[:, None])


def naive(q, k, v, mask, scale=None):
    """A masked softmax over the whole row."""
    shared = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(shared, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def drawn(tokens, heads=GQA, size=8, dtype=torch.float64, seed=0):
    """q, k, v that want gradients, and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count):
        return torch.randn(tokens, count, size, dtype=dtype, generator=generator)

    q, k, v, grad = draw(heads[0]), draw(heads[1]), draw(heads[1]), draw(heads[0])
    return [t.requires_grad_() for t in (q, k, v)], grad


def value_and_gradients(attend, inputs, grad):
    out = attend(*inputs)
    return out, *torch.autograd.grad(out, inputs, grad)


def close(found, wanted, atol, rtol=0.0):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def check_against_the_mask(documents, heads=GQA, scale=None, seed=0):
    inputs, grad = drawn(sum(d.tokens for d in documents), heads, seed=seed)
    plan, mask = AttentionPlan(segments(documents)), visibility(documents)
    close(
        value_and_gradients(
            lambda q, k, v: packed_attention(q, k, v, plan, scale=scale), inputs, grad
        ),
        value_and_gradients(lambda q, k, v: naive(q, k, v, mask, scale), inputs, grad),
        atol=1e-12,
    )


@pytest.mark.parametrize("heads", [GQA, (4, 4), (1, 1), (4, 1)], ids=str)
@pytest.mark.parametrize("documents", TABLE, ids=str)
def test_values_and_gradients_are_those_of_a_masked_softmax(documents, heads):
    check_against_the_mask(documents, heads)


@settings(deadline=None)
@given(documents=rows, seed=st.integers(0, 99))
def test_values_and_gradients_of_any_row_are_those_of_a_masked_softmax(documents, seed):
    check_against_the_mask(documents, seed=seed)


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_the_scale_is_the_one_asked_for(scale):
    check_against_the_mask([Document(5), Document(3, (2, 4))], scale=scale)


def test_large_scores_do_not_overflow_where_trunk_and_branch_are_merged():
    documents = [Document(6, (4, 5))]
    (q, k, v), grad = drawn(15)
    inputs = [(100 * q).detach().requires_grad_(), k, v]
    plan, mask = AttentionPlan(segments(documents)), visibility(documents)
    found = value_and_gradients(lambda *qkv: packed_attention(*qkv, plan), inputs, grad)
    assert all(t.isfinite().all() for t in found)
    wanted = value_and_gradients(lambda *qkv: naive(*qkv, mask), inputs, grad)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def alone(document):
    """The positions of each path through a document: trunk and one branch, or the trunk."""
    trunk = list(range(document.trunk))
    start, paths = document.trunk, []
    for length in document.branches:
        paths.append(trunk + list(range(start, start + length)))
        start += length
    return paths or [trunk]


@settings(deadline=None)
@given(documents=rows, seed=st.integers(0, 99))
def test_a_packed_document_is_what_it_is_alone_in_single_precision(documents, seed):
    inputs, _ = drawn(sum(d.tokens for d in documents), dtype=torch.float32, seed=seed)
    q, k, v = (t.detach() for t in inputs)
    out = packed_attention(q, k, v, AttentionPlan(segments(documents)))
    first = 0
    for document in documents:
        for path in alone(document):
            at = torch.tensor(path) + first
            single = [t[at].transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
            wanted = F.scaled_dot_product_attention(*single, is_causal=True, enable_gqa=True)
            # Also relative: of a value of 2, the eighth digit alone is 1e-7.
            close([out[at]], [wanted.squeeze(0).transpose(0, 1)], atol=1e-6, rtol=1e-6)
        first += document.tokens


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_what_is_in_one_document_never_reaches_another(poison, at):
    # Two trunks of one length, seen in one call, with padding.
    documents = [Document(5), Document(4, (3, 2)), Document(5), Document(4, (6,))]
    bounds = [(0, 5), (5, 14), (14, 19), (19, 29)]
    (q, k, v), grad = drawn(29)
    plan = AttentionPlan(segments(documents))
    clean = value_and_gradients(lambda *qkv: packed_attention(*qkv, plan), [q, k, v], grad)
    poisoned = [t.detach().clone() for t in (q, k, v)]
    for tensor in poisoned:
        tensor[slice(*bounds[at])] = poison
        tensor.requires_grad_()
    grad = grad.clone()
    grad[slice(*bounds[at])] = poison
    found = value_and_gradients(lambda *qkv: packed_attention(*qkv, plan), poisoned, grad)
    others = [i for n, (a, b) in enumerate(bounds) if n != at for i in range(a, b)]
    close([t[others] for t in found], [t[others] for t in clean], atol=1e-12)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    branches=st.lists(st.lists(st.integers(1, 500), max_size=8), max_size=5),
)
def test_the_plan_pays_for_the_squares_of_documents_and_never_for_that_of_the_row(
    lengths, branches
):
    documents = [Document(n) for n in lengths] + [Document(9, tuple(b)) for b in branches]
    row = segments(documents)
    plan = AttentionPlan(row)
    taken = [bucket.take(torch.zeros(sum(s.length for s in row), 1)) for bucket in plan.buckets]
    calls = [(count, length) for count, _, length in (t.shape for t in taken)]
    # Every segment is a row of its own in exactly one call, next to others about as long.
    assert sum(count for count, _ in calls) == len(row)
    longest = max(segment.length for segment in row)
    assert max(length for _, length in calls) == longest
    paid = sum(count * length**2 for count, length in calls)
    needed = sum(segment.length**2 for segment in row)
    assert paid <= 1.6 * needed + 100 * len(row)
    # A branch's call to its trunk is hardly larger than what it sees.
    paid = sum(q.index.numel() * k.index.shape[1] for q, k in plan.to_trunks)
    needed = sum(d.trunk * sum(d.branches) for d in documents)
    assert needed <= paid <= 1.2 * needed + 9 * 5 * len(branches)


@settings(deadline=None)
@given(documents=rows)
def test_every_token_is_in_one_call_and_padding_only_where_the_plan_says_so(documents):
    plan = AttentionPlan(segments(documents))
    tokens = torch.arange(1, sum(d.tokens for d in documents) + 1).unsqueeze(-1)
    found = []
    for bucket in plan.buckets:
        taken = bucket.take(tokens).squeeze(1)
        found += (taken if bucket.real is None else taken[bucket.real]).flatten().tolist()
    assert sorted(found) == tokens.flatten().tolist()
    assert torch.equal(plan.row.of([bucket.take(tokens) for bucket in plan.buckets]), tokens)


def test_tokens_that_no_call_had_get_what_they_lack():
    plan = AttentionPlan(segments([Document(2, (1, 2)), Document(3)]))
    tokens = torch.arange(1.0, 9.0).unsqueeze(-1)
    [(branches, trunks)] = plan.to_trunks
    of_branches = plan.branches.of([branches.take(tokens)], lacking=-1.0)
    assert of_branches.flatten().tolist() == [-1, -1, 3, 4, 5, -1, -1, -1]
    of_trunks = plan.trunks.of([trunks.take(tokens)])
    assert of_trunks.flatten().tolist() == [1, 2, 0, 0, 0, 0, 0, 0]


def test_trunks_of_one_length_are_seen_in_one_call():
    row = segments([Document(5, (3, 3)), Document(4, (2,)), Document(5, (6,)), Document(5)])
    calls = AttentionPlan(row).to_trunks
    assert sorted(tuple(q.index.shape) + tuple(k.index.shape) for q, k in calls) == [
        (1, 2, 1, 4),
        (2, 6, 2, 5),
    ]


def test_long_segments_are_called_alone_and_without_a_copy():
    row = segments([Document(300), Document(299), Document(4)])
    tokens = torch.zeros(603, 2)
    taken = [bucket.take(tokens) for bucket in AttentionPlan(row).buckets]
    assert [t.shape[-1] for t in taken] == [300, 299, 4]
    assert {t.untyped_storage().data_ptr() for t in taken} == {tokens.untyped_storage().data_ptr()}


def test_few_calls_for_many_documents_of_like_length():
    assert len(AttentionPlan(segments([Document(100 - i % 5) for i in range(50)])).buckets) == 1


def test_many_documents_of_one_length_are_not_padded():
    plan = AttentionPlan(segments([Document(40, (32,) * 8) for _ in range(4)]))
    assert [len(bucket.index) for bucket in plan.buckets if bucket.real is None] == [32, 4]


def as_batch(*tensors):
    return [t.unsqueeze(0) for t in tensors]


@pytest.mark.parametrize("without", ["", "packed_attention"])
def test_the_module_attends_as_the_plan_says(without, monkeypatch):
    monkeypatch.setenv(VARIABLE, without)
    documents = [Document(5), Document(3, (2, 4))]
    (q, k, v), _ = drawn(14)
    plan = AttentionPlan(segments(documents))
    module = PackedAttention(PackedAttention.Config())
    out = module(*as_batch(q, k, v), attention_masks=plan, scale=0.5)
    close([out], as_batch(naive(q, k, v, visibility(documents), 0.5)), atol=1e-12)


def test_the_module_without_a_plan_takes_every_row_for_a_document():
    (q, k, v), _ = drawn(12)
    module = PackedAttention(PackedAttention.Config())
    out = module(*(t.unflatten(0, (2, 6)) for t in (q, k, v)), scale=0.5)
    wanted = naive(q, k, v, visibility([Document(6), Document(6)]), 0.5)
    close([out.flatten(0, 1)], [wanted], atol=1e-12)
