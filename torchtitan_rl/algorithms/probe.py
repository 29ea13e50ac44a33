"""Trial of a loss function of the user's on a few tokens and on none, before the trainer starts.

A loss that fails on a rank fails inside a collective, where the other ranks wait for it.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace

import torch

from torchtitan_rl.algorithms.policy_loss import LossInputs, LossOutput
from torchtitan_rl.core.errors import raised_at


def try_loss(name: str, loss: Callable[[LossInputs], LossOutput], *, has_reference: bool) -> None:
    """Refuse a loss function that fails on trial tokens; each kind of mistake has its own
    message."""
    who = f"loss {name!r}"
    for tokens in (3, 0):
        inputs = probe_inputs(tokens, has_reference=has_reference)
        batch = f"on a trial batch of {tokens} tokens"
        try:
            output = loss(inputs)
        except Exception as error:
            hint = "" if has_reference else " (without trainer.loss.ref_kl, ref_logprobs is None)"
            where = raised_at(error, name.partition(":")[0])
            raise ValueError(
                f"{who} failed {batch}{hint}, {where}: {error!r}; its inputs have "
                f"{', '.join(f.name for f in fields(LossInputs))}"
            ) from error
        if not isinstance(output, LossOutput) or not isinstance(output.loss_sum, torch.Tensor):
            raise ValueError(f"{who} must return a LossOutput(loss_sum, metrics); got {output!r}")
        if output.loss_sum.shape != () or not output.loss_sum.isfinite():
            hint = "" if tokens else " (a rank may have none: sum, with inputs.total, not mean)"
            raise ValueError(
                f"{who} must return a finite scalar loss_sum; got {output.loss_sum} {batch}{hint}"
            )
        _check_gradient(who, output.loss_sum, inputs.logprobs)
        _check_metrics(who, output.metrics)
        _check_held(who, output, tokens)
    inputs = probe_inputs(3, has_reference=has_reference)
    if loss(replace(inputs, weights=torch.zeros(3))).loss_sum.item() != 0:
        raise ValueError(
            f"{who} leaves out inputs.weights, so that reductions and corrections would have no "
            "effect: return LossOutput(inputs.total(loss_per_token))"
        )


def needs_generator_logprobs(loss: Callable[[LossInputs], LossOutput]) -> bool:
    """Whether a loss fails without the logprobs recorded at sampling time."""
    try:
        loss(replace(probe_inputs(3, has_reference=True), generator_logprobs=None))
    except Exception:
        return True
    return False


def probe_inputs(tokens: int, *, has_reference: bool) -> LossInputs:
    """Trial inputs: tokens of two sequences, with advantages of either sign."""
    steps = torch.arange(tokens, dtype=torch.float32)
    return LossInputs(
        logprobs=(-0.5 - 0.1 * steps).requires_grad_(),
        old_logprobs=-0.5 - 0.1 * steps,
        advantages=1.0 - steps,
        weights=torch.ones(tokens),
        sequence_ids=torch.arange(tokens) // 2,
        generator_logprobs=-0.6 - 0.1 * steps,
        ref_logprobs=-0.4 - 0.1 * steps if has_reference else None,
    )


def _check_gradient(who: str, loss_sum: torch.Tensor, logprobs: torch.Tensor) -> None:
    gradient = None
    if loss_sum.requires_grad:
        (gradient,) = torch.autograd.grad(loss_sum, logprobs, allow_unused=True)
    if gradient is None:
        raise ValueError(f"{who}: loss_sum has no gradient; build it from inputs.logprobs")
    if not gradient.isfinite().all():
        raise ValueError(f"{who}: the gradient of loss_sum is not finite: {gradient.tolist()}")


def _check_metrics(who: str, metrics: object) -> None:
    if not isinstance(metrics, Mapping):
        raise ValueError(f"{who}: metrics must be a dict; got {metrics!r}")
    for name, metric in metrics.items():
        if not hasattr(metric, "merge"):
            raise ValueError(
                f"{who}: metric {name!r} is {metric!r}; give it as Mean(total, weight) or another "
                "of torchtitan_rl.core.metrics, which know how to merge"
            )


def _check_held(who: str, output: LossOutput, tokens: int) -> None:
    for name, held in (("high", output.high), ("low", output.low)):
        if held is not None and (held.dtype != torch.bool or held.shape != (tokens,)):
            raise ValueError(
                f"{who}: {name} must be a bool for each token; got {held.dtype} of shape "
                f"{tuple(held.shape)}"
            )
