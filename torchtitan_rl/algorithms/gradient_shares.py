"""Share of each term of the loss in the gradient: whether Echo or a KL term drowns the policy loss.

A backward pass for every term would tell exactly, and cost as much as the training itself. The sum
of the terms has one, which gives the gradient of the last hidden states, token by token. With the
terms' own slopes d term / d logprob it falls into a part for each term. These parts are taken
together as the gradient of a weight would be: that of a matrix, at first the identity, between the
model and its output layer. Its norm stands for that of all weights.
"""

from collections.abc import Mapping, Sequence

import torch


def slopes_of(terms: Mapping[str, torch.Tensor], logprobs: torch.Tensor) -> torch.Tensor:
    """[terms, tokens] derivatives of each term by the logprob of each token.

    Example:
        >>> t = torch.tensor([-1.0, -2.0], requires_grad=True)
        >>> slopes_of({"policy": -t[0], "echo": -0.5 * t[1]}, t)
        tensor([[-1.0000,  0.0000],
                [ 0.0000, -0.5000]])
    """
    if not terms:  # a batch of nothing: its backward pass is run all the same
        return logprobs.new_zeros(1, len(logprobs))
    return torch.stack([_slope(term, logprobs) for term in terms.values()])


def _slope(term: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    if not term.requires_grad:  # a loss that is a constant here, which the trainer looks at
        return torch.zeros_like(logprobs)
    return torch.autograd.grad(term, logprobs, retain_graph=True, materialize_grads=True)[0]


class GradientShares:
    """Adds up the gradient of each term over the microbatches of an update.

    Example:
        shares = GradientShares(["policy", "echo"], dim=128)
        shares.add(slopes, hidden)
        shares.shares()  # {"policy": 0.2, "echo": 0.8}
    """

    def __init__(
        self, terms: Sequence[str], *, dim: int, device: torch.device | None = None
    ) -> None:
        self._terms = list(terms)
        self.total = torch.zeros(len(self._terms), dim, dim, device=device)
        """[terms, dim, dim] the gradient of each term; that of a batch is the sum over ranks."""

    def add(self, slopes: torch.Tensor, hidden: torch.Tensor) -> None:
        """A microbatch after its backward pass: `slopes` [terms, tokens], and the hidden states
        [tokens, dim] that its tokens are predicted from, with their gradient."""
        assert hidden.grad is not None
        whole = slopes.sum(0)
        # The gradient of a token is its slope times what the model makes of it: each term has the
        # part that its slope has. Terms that cancel out leave nothing to divide.
        parts = torch.where(whole != 0, slopes / whole, 0.0)
        states, gradient = hidden.detach().float(), hidden.grad.float()
        for total, part in zip(self.total, parts, strict=True):
            total.addmm_((part.unsqueeze(-1) * gradient).T, states)

    def shares(self) -> dict[str, float]:
        """Share of each term in the sum of their norms; empty if there is no gradient at all."""
        norms = self.total.flatten(1).norm(dim=1)
        if not norms.sum() > 0:
            return {}
        return dict(zip(self._terms, (norms / norms.sum()).tolist(), strict=True))
