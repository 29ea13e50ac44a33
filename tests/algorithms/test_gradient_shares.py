"""Each term's share of the gradient: against autograd, a backward pass for every term."""

import pytest
import torch

from torchtitan_rl.algorithms.gradient_shares import GradientShares, slopes_of

TOKENS, DIM, VOCAB = 12, 5, 11


def model():
    """Hidden states of some tokens, the tokens, and the matrix before the output layer."""
    torch.manual_seed(0)
    hidden, head = torch.randn(TOKENS, DIM), torch.randn(VOCAB, DIM)
    targets = torch.randint(VOCAB, (TOKENS,))
    matrix = torch.eye(DIM, requires_grad=True)
    states = hidden @ matrix.T
    logprobs = torch.log_softmax(states @ head.T, -1)[torch.arange(TOKENS), targets]
    return hidden, matrix, states, logprobs


def terms_of(t, *, alpha=0.5):
    """Policy loss and KL on the first eight tokens, Echo on the others."""
    advantages = torch.linspace(-1, 1, 8)
    return {
        "policy": -(advantages * t[:8]).sum() / 8,
        "ref_kl": 0.1 * (t[:8] + 2).square().sum() / 8,
        "echo": -alpha * t[8:].sum() / 4,
    }


@pytest.mark.parametrize("alpha", [0.01, 0.5, 10.0])
def test_shares_agree_with_a_backward_pass_for_every_term(alpha):
    _, matrix, _, logprobs = model()
    norms = {
        name: torch.autograd.grad(term, matrix, retain_graph=True)[0].norm().item()
        for name, term in terms_of(logprobs, alpha=alpha).items()
    }
    expected = {name: norm / sum(norms.values()) for name, norm in norms.items()}

    shares = GradientShares(list(norms), dim=DIM)
    _, _, states, logprobs = model()
    states.retain_grad()
    leaf = logprobs.detach().requires_grad_()
    slopes = slopes_of(terms_of(leaf, alpha=alpha), leaf)
    logprobs.backward(slopes.sum(0))
    # In two microbatches: gradients add up before their norms are taken.
    for some in (slice(0, 5), slice(5, None)):
        part = states[some].detach().requires_grad_()
        part.grad = states.grad[some]
        shares.add(slopes[:, some], part)
    assert shares.shares() == pytest.approx(expected, rel=1e-5)
    assert sum(shares.shares().values()) == pytest.approx(1)


def test_tokens_that_pull_in_opposite_directions_leave_little():
    """A share is no sum of norms over tokens: what cancels out in the weights does not count."""
    shares = GradientShares(["policy", "echo"], dim=2)
    hidden = torch.ones(4, 2, requires_grad=True)
    hidden.grad = torch.tensor([[1.0, 0.0], [-0.9, 0.0], [0.1, 0.0], [0.1, 0.0]])
    slopes = torch.tensor([[1.0, -0.9, 0.0, 0.0], [0.0, 0.0, 0.1, 0.1]])
    shares.add(slopes, hidden)
    assert shares.shares() == pytest.approx({"policy": 1 / 3, "echo": 2 / 3})


def test_without_any_gradient_there_are_no_shares():
    shares = GradientShares(["policy", "echo"], dim=3)
    assert shares.shares() == {}
    nothing = torch.zeros(0, 3, requires_grad=True)
    nothing.grad = torch.zeros(0, 3)
    shares.add(torch.zeros(2, 0), nothing)
    assert shares.shares() == {}


def test_slopes_of_no_term_are_zero():
    assert slopes_of({}, torch.zeros(3)).tolist() == [[0.0, 0.0, 0.0]]
