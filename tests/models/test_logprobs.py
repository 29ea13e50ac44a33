"""Logprobs from hidden states, piece by piece, against log_softmax of the whole."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from torchtitan_rl.models.logprobs import PIECE_ELEMENTS, VocabShard, chosen_logprobs

TOKENS, DIM, VOCAB = 6, 5, 11
TEMPERATURES = [1.0, 0.5, 2.0, 0.7, 1.0, 3.0]


def sample(*, tokens=TOKENS, scale=1.0, dtype=torch.float32):
    """hidden, weight, targets, temperatures; the targets are in no order and repeat."""
    torch.manual_seed(0)
    hidden = (scale * torch.randn(tokens, DIM)).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, DIM).to(dtype).requires_grad_()
    targets = torch.tensor([10, 0, 4, 4, 7, 5])[:tokens]
    return hidden, weight, targets, torch.tensor(TEMPERATURES)[:tokens]


def plain(hidden, weight, targets, temperatures):
    """Logprobs and entropies by log_softmax of all logits, in fp64."""
    logits = hidden.double() @ weight.double().T / temperatures.double().unsqueeze(-1)
    logprobs = torch.log_softmax(logits, -1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropies


def slopes(logprobs, hidden, weight):
    """Gradients by hidden and weight of a sum in which every token counts differently."""
    factors = torch.linspace(-1, 2, len(logprobs))
    return torch.autograd.grad((logprobs * factors).sum(), (hidden, weight))


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, check_dtype=False)


def test_values_by_hand():
    # Logits are 0, ln 2 and ln 5 at temperature 1; at 1/2 their odds are 1 : 4 : 25.
    hidden = torch.ones(2, 1)
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(5)]])
    logprobs, entropies = chosen_logprobs(
        hidden, weight, torch.tensor([1, 2]), torch.tensor([1.0, 0.5])
    )
    assert logprobs.exp().tolist() == pytest.approx([2 / 8, 25 / 30])
    odds = [[1 / 8, 2 / 8, 5 / 8], [1 / 30, 4 / 30, 25 / 30]]
    expected = [-sum(p * math.log(p) for p in row) for row in odds]
    assert entropies.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("piece", [1, VOCAB, 2 * VOCAB, 4 * VOCAB + 3, 6 * VOCAB, 2**23])
def test_any_piece_size_gives_the_values_and_gradients_of_the_whole(monkeypatch, piece):
    monkeypatch.setitem(PIECE_ELEMENTS, "cpu", piece)
    inputs = sample()
    logprobs, entropies = chosen_logprobs(*inputs)
    expected, expected_entropies = plain(*inputs)
    close(logprobs, expected)
    close(entropies, expected_entropies)
    for actual, wanted in zip(
        slopes(logprobs, *inputs[:2]), slopes(expected, *inputs[:2]), strict=True
    ):
        close(actual, wanted)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 30.0])
def test_flat_and_peaked_distributions(scale):
    inputs = sample(scale=scale)
    logprobs, entropies = chosen_logprobs(*inputs)
    expected, expected_entropies = plain(*inputs)
    close(logprobs, expected)
    torch.testing.assert_close(entropies.double(), expected_entropies, rtol=1e-5, atol=1e-4)
    for actual, wanted in zip(
        slopes(logprobs, *inputs[:2]), slopes(expected, *inputs[:2]), strict=True
    ):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4 * max(scale, 1))


def test_the_gradients_agree_with_finite_differences():
    hidden, weight, targets, temperatures = sample(dtype=torch.float64)

    def logprobs(hidden, weight):
        return chosen_logprobs(hidden, weight, targets, temperatures)[0].double()

    # Logits are fp32 inside, so that steps have to be large and tolerances loose.
    assert torch.autograd.gradcheck(logprobs, (hidden, weight), eps=1e-2, atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("piece", [2 * VOCAB, 2**23], ids=["pieces", "at once"])
def test_a_gradient_that_is_there_is_added_to_where_it_is(monkeypatch, piece):
    monkeypatch.setitem(PIECE_ELEMENTS, "cpu", piece)
    hidden, weight, *rest = sample()
    made = []  # by autograd, for it to add
    weight.register_hook(made.append)
    for times in range(1, 4):
        logprobs, _ = chosen_logprobs(hidden, weight, *rest, add_to_grad=True)
        logprobs.sum().backward()
        if times == 1:
            once = weight.grad.clone()
        close(weight.grad, times * once)
    assert [gradient is not None for gradient in made] == [True, False, False]
    [expected] = torch.autograd.grad(plain(hidden, weight, *rest)[0].sum(), weight)
    close(once, expected)


def test_a_frozen_weight_gets_nothing_though_it_has_a_gradient():
    hidden, weight, *rest = sample()
    weight.grad = torch.ones_like(weight)
    weight.requires_grad_(False)
    chosen_logprobs(hidden, weight, *rest, add_to_grad=True)[0].sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))
    [expected] = torch.autograd.grad(plain(hidden, weight, *rest)[0].sum(), hidden)
    close(hidden.grad, expected)


def test_pieces_in_half_precision_are_added_up_in_full(monkeypatch):
    monkeypatch.setitem(PIECE_ELEMENTS, "cpu", VOCAB)  # a token each
    hidden, weight, *rest = sample(dtype=torch.bfloat16)
    weight.grad = torch.zeros_like(weight)
    chosen_logprobs(hidden, weight, *rest, add_to_grad=True)[0].sum().backward()
    once = weight.grad
    weight.grad = None
    chosen_logprobs(hidden, weight, *rest)[0].sum().backward()
    assert torch.equal(once, weight.grad)


def test_each_token_has_its_own_temperature():
    hidden, weight, targets, temperatures = sample()
    together, entropies = chosen_logprobs(hidden, weight, targets, temperatures)
    for i in range(TOKENS):
        alone = chosen_logprobs(hidden[[i]], weight, targets[[i]], temperatures[[i]])
        close(together[[i]], alone[0])
        close(entropies[[i]], alone[1])
    at_one, _ = chosen_logprobs(hidden, weight, targets, torch.ones(TOKENS))
    same = (at_one - together).abs() < 1e-5
    assert same.tolist() == [temperature == 1 for temperature in TEMPERATURES]


def test_no_tokens_give_empty_results_that_still_run_backward():
    inputs = sample(tokens=0)
    logprobs, entropies = chosen_logprobs(*inputs)
    assert logprobs.shape == entropies.shape == (0,)
    grad_hidden, grad_weight = slopes(logprobs, *inputs[:2])
    assert grad_hidden.shape == (0, DIM)
    assert grad_weight.tolist() == torch.zeros(VOCAB, DIM).tolist()


def test_bfloat16_inputs_give_float32_results_and_bfloat16_gradients():
    inputs = sample(dtype=torch.bfloat16)
    logprobs, entropies = chosen_logprobs(*inputs)
    assert logprobs.dtype == entropies.dtype == torch.float32
    expected, expected_entropies = plain(*inputs)
    close(logprobs, expected, 0.03)
    close(entropies, expected_entropies, 0.03)
    grads = slopes(logprobs, *inputs[:2])
    assert [grad.dtype for grad in grads] == [torch.bfloat16] * 2
    for actual, wanted in zip(grads, slopes(expected, *inputs[:2]), strict=True):
        close(actual, wanted, 0.05)


def test_only_the_logprobs_carry_a_gradient():
    logprobs, entropies = chosen_logprobs(*sample())
    assert logprobs.requires_grad
    assert not entropies.requires_grad


@pytest.mark.parametrize(
    ("start", "size", "targets", "rows", "here"),
    [
        (0, 4, [0, 3, 4, 9], [0, 3, 3, 3], [True, True, False, False]),
        (4, 4, [0, 3, 4, 7, 8], [0, 0, 0, 3, 3], [False, False, True, True, False]),
        (8, 2, [7, 8, 9], [0, 0, 1], [False, True, True]),
        (0, 4, [], [], []),
    ],
)
def test_which_targets_lie_in_a_shard_and_where(start, size, targets, rows, here):
    found = VocabShard(start=start).own(torch.tensor(targets, dtype=torch.int64), size)
    assert [tensor.tolist() for tensor in found] == [rows, here]


class Ranks:
    """Threads that combine tensors as ranks do: each waits for the others' part."""

    def __init__(self, size):
        self.parts = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def combine(self, rank, operation, part):
        self.parts[rank] = part
        self.barrier.wait()
        result = operation(torch.stack(self.parts), 0)
        self.barrier.wait()
        return result


@pytest.mark.parametrize("sizes", [[6, 5], [1, 10], [4, 4, 3]])
@pytest.mark.parametrize("piece", [1, 12, 2**23], ids=["token by token", "pieces", "at once"])
def test_shards_of_the_vocabulary_give_what_the_whole_gives(monkeypatch, sizes, piece):
    monkeypatch.setitem(PIECE_ELEMENTS, "cpu", piece)
    hidden, weight, targets, temperatures = sample()
    ranks = Ranks(len(sizes))

    def run(rank):
        start = sum(sizes[:rank])
        shard = VocabShard(
            start=start,
            largest=max(sizes),
            sum=partial(ranks.combine, rank, torch.sum),
            max=partial(ranks.combine, rank, torch.amax),
        )
        own = weight.detach()[start : start + sizes[rank]].requires_grad_()
        mine = hidden.detach().requires_grad_()
        logprobs, entropies = chosen_logprobs(mine, own, targets, temperatures, shard=shard)
        return logprobs.detach(), entropies, *slopes(logprobs, mine, own)

    with ThreadPoolExecutor(len(sizes)) as pool:
        results = list(pool.map(run, range(len(sizes))))
    whole, whole_entropies = plain(hidden, weight, targets, temperatures)
    grad_hidden, grad_weight = slopes(whole, hidden, weight)
    for logprobs, entropies, by_hidden, _ in results:
        close(logprobs, whole.detach())
        close(entropies, whole_entropies.detach())
        close(by_hidden, grad_hidden)
    close(torch.cat([result[3] for result in results]), grad_weight)
