"""Why a loss or its gradient is NaN or infinite: which values of a microbatch were so first."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

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


@dataclass(slots=True)
class Watched:
    """A microbatch of an update, kept until the update is checked."""

    config: LossConfig
    terms: Mapping[str, torch.Tensor]
    inputs: LossInputs
    names: Sequence[str]
    gradients: list[torch.Tensor] = field(default_factory=list)
    """[tokens] what the backward pass has given the logprobs, term by term."""

    def causes(self) -> Iterator[str]:
        """What was not finite: in the forward pass, else in the backward pass."""
        if not _all_finite(self.terms.values()):
            yield why_not_finite(self.config, self.inputs, self.terms, self.names)
            return
        what = f"the gradients of loss {self.config.name!r}, which is finite,"
        for gradient in self.gradients:
            if said := bad_values(what, gradient, self.inputs.sequence_ids, self.names):
                yield said


class NotFinite:
    """What was not finite in the microbatches of one update, on this rank. The gradient norm only
    says that something was.

    Microbatches are only kept as they pass, about 40 bytes a token: to look at their values would
    be to wait for the GPU before each backward pass.

    Example:
        not_finite = NotFinite()
        not_finite.watch(config, {"policy": loss}, inputs, names=["sums/train/7/0/0"])
        loss.backward()
        not_finite.found  # ["the advantages are not finite in 2 of 9 tokens, ..."]
    """

    def __init__(self) -> None:
        self._watched: list[Watched] = []

    def watch(
        self,
        config: LossConfig,
        terms: Mapping[str, torch.Tensor],
        inputs: LossInputs,
        names: Sequence[str],
    ) -> None:
        """Keep a microbatch, and what its backward pass will give. `terms` are the parts of its
        loss; `names` are those of its sequences, by `sequence_ids`."""
        detached = {name: term.detach() for name, term in terms.items()}
        constant = replace(inputs, logprobs=inputs.logprobs.detach())
        watched = Watched(config, detached, constant, names)
        self._watched.append(watched)
        if inputs.logprobs.requires_grad:
            inputs.logprobs.register_hook(watched.gradients.append)

    @property
    def found(self) -> list[str]:
        """What was not finite, in the order of the microbatches; empty if nothing was."""
        held = [t for w in self._watched for t in (*w.terms.values(), *w.gradients)]
        if _all_finite(held):
            return []
        return [cause for watched in self._watched for cause in watched.causes()]

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
        for name, what in WHAT.items()
        if (values := getattr(inputs, name)) is not None
        and (said := bad_values(what, values, inputs.sequence_ids, names))
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


def _all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all values of some tensors are finite; read from their device at once."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    return not flat or bool(torch.cat(flat).isfinite().all())


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
