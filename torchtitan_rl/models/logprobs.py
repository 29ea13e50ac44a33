"""Logprobs of chosen tokens straight from hidden states, at the positions that train and no others.

Logits are made a piece at a time, in the forward pass and again in the backward pass, so that
[tokens, vocab] in fp32, by far the largest tensor of a step, never exists whole.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan_rl.models.cpu.products import product
from torchtitan_rl.platform import device_type

PIECE_ELEMENTS = {"cpu": 2**23, "cuda": 2**27}
"""Logits in one piece: 32 MB in fp32 on a CPU; a GPU needs larger ones to be busy."""

BLOCK_ELEMENTS = {"cpu": 2**19}
"""Logits that are gone over together: on a CPU so few that they stay in its cache meanwhile."""


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The rows of the vocabulary that this rank holds, and how the ranks combine their parts."""

    start: int = 0
    largest: int = 0
    """Rows of the largest shard, by which all ranks cut their pieces: they meet in each of them.
    0: this is the only one."""
    sum: Callable[[torch.Tensor], torch.Tensor] = _same
    """Over all ranks; like `max` it may overwrite what it is given."""
    max: Callable[[torch.Tensor], torch.Tensor] = _same

    def own(self, targets: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Targets as rows of this shard, and which of them lie in it."""
        rows = targets - self.start
        here = (rows >= 0) & (rows < size)
        return rows.clamp(0, size - 1), here


WHOLE_VOCABULARY = VocabShard()


def chosen_logprobs(
    hidden: torch.Tensor,  # [tokens, dim]
    weight: torch.Tensor,  # [vocab, dim]
    targets: torch.Tensor,  # [tokens]
    temperatures: torch.Tensor,  # [tokens]
    *,
    shard: VocabShard = WHOLE_VOCABULARY,
    add_to_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target) [tokens], with gradient, and entropy [tokens], without; both fp32.

    Of the distribution that was sampled from: logits are divided by the temperature of each token,
    as the generator did. With `add_to_grad`, the backward pass adds to the gradient that the weight
    has, if it has one, and makes none for autograd to add: it may be larger than all other memory.

    Example:
        >>> hidden, weight = torch.zeros(1, 2), torch.zeros(4, 2)
        >>> chosen_logprobs(hidden, weight, torch.tensor([3]), torch.ones(1))[0].exp()
        tensor([0.2500])
    """
    return _ChosenLogprobs.apply(hidden, weight, targets, temperatures, shard, add_to_grad)


def _pieces(tokens: int, weight: torch.Tensor, shard: VocabShard) -> Iterator[slice]:
    rows = shard.largest or len(weight)
    size = max(1, PIECE_ELEMENTS[device_type()] // rows)
    for start in range(0, tokens, size):
        yield slice(start, start + size)


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    scale = temperatures.unsqueeze(-1)
    if hidden.dtype == torch.float32:  # hidden states are fewer than logits
        return product(hidden / scale, weight.T)
    return (hidden @ weight.T).float().div_(scale)


def _statistics(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """For each token, the largest of its logits [tokens, vocab] (`top`), and the sums over the
    vocabulary of exp(logit - top) and of exp(logit - top)·(logit - top).

    Logits are overwritten by logit - top. The largest logit is subtracted first, because
    differences of large numbers would cost digits.
    """
    tops, totals, moments = (logits.new_empty(len(logits)) for _ in range(3))
    size = BLOCK_ELEMENTS.get(device_type(), logits.numel()) // max(1, logits.shape[-1])
    for start in range(0, len(logits), max(1, size)):
        block = slice(start, start + max(1, size))
        tops[block] = top = logits[block].amax(-1)
        shifted = logits[block].sub_(top.unsqueeze(-1))
        exps = shifted.exp()
        totals[block] = exps.sum(-1)
        moments[block] = torch.linalg.vecdot(exps, shifted)
    return tops, totals, moments


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        shard: VocabShard,
        add_to_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = len(targets)
        # Not views of one tensor: FSDP hangs its hooks on what a module returns.
        logprobs, entropies, log_totals = (
            hidden.new_empty(tokens, dtype=torch.float32) for _ in range(3)
        )
        for piece in _pieces(tokens, weight, shard):
            logits = _logits(hidden[piece], weight, temperatures[piece])
            rows, here = shard.own(targets[piece], len(weight))
            chosen = logits.gather(-1, rows.unsqueeze(-1)).squeeze(-1)
            own_top, own_total, own_moment = _statistics(logits)
            # The shards' sums, as if all had started from the largest logit of the vocabulary.
            top = shard.max(own_top.clone())
            lower = own_top - top
            moment = lower.exp() * (own_moment + lower * own_total)
            parts = [lower.exp() * own_total, moment, (chosen - top) * here]
            total, moment, chosen = shard.sum(torch.stack(parts))
            logprobs[piece] = chosen - total.log()
            entropies[piece] = total.log() - moment / total
            log_totals[piece] = top + total.log()
            del logits  # before the next piece is made, not after
        ctx.save_for_backward(hidden, weight, targets, temperatures, log_totals)
        ctx.shard = shard
        ctx.weight = weight if add_to_grad else None
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        """d log p(target) / d logits = (one-hot of the target - p) / temperature."""
        hidden, weight, targets, temperatures, log_totals = ctx.saved_tensors
        scale = grad / temperatures
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        of_weight = ctx.needs_input_grad[1]
        held = ctx.weight.grad if ctx.weight is not None and of_weight else None
        # In half precision the pieces would be rounded one by one.
        in_place = held is not None and held.dtype == torch.float32
        grad_weight = held if in_place else None
        for piece in _pieces(len(targets), weight, ctx.shard):
            logits = _logits(hidden[piece], weight, temperatures[piece])
            probabilities = logits.sub_(log_totals[piece].unsqueeze(-1)).exp_()
            grad_logits = probabilities.mul_(-scale[piece].unsqueeze(-1))
            del logits, probabilities
            rows, here = ctx.shard.own(targets[piece], len(weight))
            grad_logits.scatter_add_(-1, rows.unsqueeze(-1), (scale[piece] * here).unsqueeze(-1))
            grad_logits = grad_logits.to(weight.dtype)
            grad_hidden[piece] = product(grad_logits, weight)
            if of_weight:
                grad_weight = _plus_product(grad_weight, grad_logits.T, hidden[piece])
            del grad_logits
        grad_hidden = ctx.shard.sum(grad_hidden)
        if in_place or not of_weight:
            return grad_hidden.to(hidden.dtype), *[None] * 5
        if grad_weight is None:  # there was no token
            grad_weight = torch.zeros_like(weight)
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), *[None] * 4


def _plus_product(
    total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor
) -> torch.Tensor:
    """total + left @ right, in its place; None is 0, and makes it fp32."""
    if total is None:
        return product(left, right).float()
    if left.dtype == total.dtype:
        return total.addmm_(left, right)
    return total.add_(left @ right)
