"""Why a loss or its gradient is NaN or infinite: which values of a microbatch were so first."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

import torch
import torch.distributed as dist

from torchtitan_rl.algorithms.policy_loss import LossInputs
from torchtitan_rl.config.loss import LossConfig

WHAT = {
    "logprobs": "the trainer's logprobs",
    "old_logprobs": "the trainer's logprobs at the start of the step (old_logprobs)",
    "advantages": "the advantages",
    "weights": "the weights of the reduction or correction (weights)",
    "generator_logprobs": "the generator's logprobs (generator_logprobs)",
    "ref_logprobs": "the reference's logprobs (ref_logprobs)",
}
"""The fields of LossInputs that a loss multiplies, in words."""


class NotFinite:
    """What was not finite in the microbatches of one update, on this rank. The gradient norm only
    says that something was.

    Example:
        not_finite = NotFinite()
        not_finite.watch(config, {"policy": loss}, inputs, names=["sums/train/7/0/0"])
        loss.backward()
        not_finite.found  # ["the advantages are not finite in 2 of 9 tokens, ..."]
    """

    def __init__(self) -> None:
        self.found: list[str] = []

    def watch(
        self,
        config: LossConfig,
        terms: Mapping[str, torch.Tensor],
        inputs: LossInputs,
        names: Sequence[str],
    ) -> None:
        """Note what is not finite in a microbatch now, and in its backward pass. `terms` are the
        parts of its loss; `names` are those of its sequences, by `sequence_ids`."""
        if not all(term.isfinite() for term in terms.values()):
            self.found.append(why_not_finite(config, inputs, terms, names))
            return

        def check(gradient: torch.Tensor) -> None:
            what = f"the gradients of loss {config.name!r}, which is finite,"
            if said := bad_values(what, gradient, inputs.sequence_ids, names):
                self.found.append(said)

        if inputs.logprobs.requires_grad:
            inputs.logprobs.register_hook(check)

    def first_of_ranks(self) -> str:
        """What was not finite first, on any rank: each knows its own microbatches. All ranks call
        this together."""
        ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, self.found[:1])
        for found in filter(None, ranks):
            return found[0]
        return (
            "All losses and their gradients by the logprobs are finite, so it is in the model's "
            "backward pass: lower trainer.optimizer.lr"
        )


def why_not_finite(
    config: LossConfig,
    inputs: LossInputs,
    terms: Mapping[str, torch.Tensor],
    names: Sequence[str],
) -> str:
    """Where the NaN or infinity of a microbatch's loss comes from: its inputs, else one of its
    terms.

    Example:
        "the generator's logprobs (generator_logprobs) are not finite in 1 of 120 tokens, the first
        of them inf in sums/train/7/0/0"
    """
    wrong = [
        said
        for field in fields(LossInputs)
        if (values := getattr(inputs, field.name)) is not None
        and values.is_floating_point()
        and (said := bad_values(WHAT[field.name], values, inputs.sequence_ids, names))
    ]
    return "; ".join(wrong or _terms(config, inputs, terms))


def bad_values(
    what: str, values: torch.Tensor, sequence_ids: torch.Tensor, names: Sequence[str]
) -> str:
    """How many of these values are not finite, and the first of them; empty if there is none."""
    bad = (~values.detach().isfinite()).nonzero().squeeze(-1)
    if not len(bad):
        return ""
    number, value = int(sequence_ids[bad[0]]), values[bad[0]].item()
    whose = f" in {names[number]}" if number < len(names) and names[number] else ""
    return (
        f"{what} are not finite in {len(bad)} of {len(values)} tokens, the first of them "
        f"{value}{whose}"
    )


def _terms(
    config: LossConfig, inputs: LossInputs, terms: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    """The terms of the loss that are not finite although all its inputs are."""
    for name, term in terms.items():
        if term.isfinite():
            continue
        if name == "echo":
            yield f"the loss of tokens that echo is {term.item()}"
            continue
        who = f"loss {config.name!r}" if name == "policy" else name
        yield f"{who} is {term.item()} although its inputs are finite; {_ratios(inputs)}"


def _ratios(inputs: LossInputs) -> str:
    """The range of the ratios' logarithms, which overflow first."""
    log_ratio = (inputs.logprobs - inputs.old_logprobs).detach()
    return f"logprobs - old_logprobs are {log_ratio.min():.3g} to {log_ratio.max():.3g}"
