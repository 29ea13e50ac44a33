"""What is minimised: policy loss, off-policy correction and KL terms, and Echo beside them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from torchtitan_rl.algorithms.correction import (
    Corrected,
    correction_weights,
)
from torchtitan_rl.algorithms.kl import ESTIMATORS
from torchtitan_rl.algorithms.policy_loss import (
    LOSSES,
    LossInputs,
    LossOutput,
    required,
)
from torchtitan_rl.algorithms.probe import needs_generator_logprobs, try_loss
from torchtitan_rl.config.correction import CorrectionConfig
from torchtitan_rl.config.loss import LossConfig
from torchtitan_rl.config.trainer import TrainerConfig
from torchtitan_rl.core.errors import TorchtitanRLError, describe_error
from torchtitan_rl.core.metrics import Mean, Metrics
from torchtitan_rl.core.plugins import check_arguments, resolve


class LossError(TorchtitanRLError, RuntimeError):
    """A loss function of the user's own failed in training; the message says which, and where."""


def policy_loss(config: LossConfig, inputs: LossInputs) -> LossOutput:
    """The configured policy loss alone. An error of a loss of the user's own names it and its
    line: of what a trainer raises, the traceback stays in that process."""
    if config.built_in is not None:
        return _call(config, inputs)
    who = f"loss {config.name!r}"
    try:
        output = _call(config, inputs)
    except Exception as error:
        said = describe_error(error, config.name.partition(":")[0])
        tokens = inputs.logprobs.numel()
        raise LossError(f"{who} raised {said}, on a microbatch of {tokens} tokens") from error
    if not isinstance(output, LossOutput):
        raise LossError(f"{who} must return a LossOutput(loss_sum, metrics); got {output!r}")
    return output


def _call(config: LossConfig, inputs: LossInputs) -> LossOutput:
    return resolve(config.name, LOSSES, what="loss")(inputs, **config.kwargs)


def check_loss(config: LossConfig) -> None:
    """Refuse a loss function of the user's own that cannot be imported, called with the configured
    keyword arguments, or trained with: it is tried on a few tokens and on none."""
    if config.built_in is not None:
        return
    function = resolve(config.name, LOSSES, what="loss")
    check_arguments(config.name, function, config.kwargs, what="loss")
    loss = partial(_call, config)
    try_loss(config.name, loss, has_reference=config.ref_kl.on)


def loss_needs(config: LossConfig) -> dict[str, str]:
    """Optional fields of an episode that a loss needs, each with the setting that needs it. A loss
    of the user's own is tried without the generator's logprobs."""
    if config.built_in is not None:
        return config.needs()
    return config.needs(generator_logprobs=needs_generator_logprobs(partial(policy_loss, config)))


def episode_needs(config: TrainerConfig) -> dict[str, str]:
    """Optional fields of an episode that a trainer needs, each with the setting that needs it."""
    replay = {"routed_experts": "trainer.router_replay"} if config.router_replay else {}
    return {**loss_needs(config.loss), **replay}


@dataclass(slots=True)
class Objective:
    """All terms of the loss for one microbatch, as sums over its tokens."""

    terms: dict[str, torch.Tensor]
    """The parts of the loss by name, each with its weights and its coefficient: scalars with
    gradient."""
    metrics: Metrics = field(default_factory=dict)
    high: torch.Tensor | None = None
    """[tokens] whether a token is clipped or left out because a ratio is too high."""
    low: torch.Tensor | None = None
    """[tokens] whether a token is clipped or left out because a ratio is too low."""

    @property
    def loss_sum(self) -> torch.Tensor:
        """What is minimised: the sum of the terms."""
        return torch.stack(list(self.terms.values())).sum()


def objective(config: LossConfig, inputs: LossInputs) -> Objective:
    """The terms that RL minimises, policy loss and KL, and the metrics of each.

    The KL terms cover every token, also those that a trust region or a correction leaves out.
    """
    tokens = float(inputs.logprobs.numel())
    correction = _correction(config.correction, inputs)
    policy = policy_loss(config, _weighed(inputs, correction))
    metrics: Metrics = dict(correction.metrics) if correction else {}
    metrics |= policy.metrics
    terms = {"policy": policy.loss_sum}
    for name, kl, other in (
        ("rollout_kl", config.rollout_kl, inputs.generator_logprobs),
        ("ref_kl", config.ref_kl, inputs.ref_logprobs),
    ):
        if kl.on:
            values = ESTIMATORS[kl.estimator](inputs.logprobs - required(other, name))
            terms[name] = kl.coef * inputs.total(values)
            metrics[name] = Mean(values.detach().sum(), tokens)
    if correction is None:
        return Objective(terms, metrics, policy.high, policy.low)
    high, low = _either(correction.high, policy.high), _either(correction.low, policy.low)
    return Objective(terms, metrics, high, low)


def batch_terms(
    rl: Mapping[str, torch.Tensor], echo: torch.Tensor, *, loss_tokens: int, echo_tokens: int
) -> dict[str, torch.Tensor]:
    """A microbatch's share of each term of what is minimised: sums of RL terms and of Echo, divided
    by the tokens of the whole batch. A term that no token of the batch has is left out.

    Example:
        >>> rl = {"policy": torch.tensor(6.0)}
        >>> batch_terms(rl, torch.tensor(2.0), loss_tokens=3, echo_tokens=8)
        {'policy': tensor(2.), 'echo': tensor(0.2500)}
    """
    terms = {name: term / loss_tokens for name, term in rl.items()} if loss_tokens else {}
    return {**terms, "echo": echo / echo_tokens} if echo_tokens else terms


def _correction(config: CorrectionConfig, inputs: LossInputs) -> Corrected | None:
    if not config.on:
        return None
    return correction_weights(
        config,
        inputs.old_logprobs,
        required(inputs.generator_logprobs, "loss.correction"),
        inputs.sequence_ids,
        inputs.sequences,
    )


def _weighed(inputs: LossInputs, correction: Corrected | None) -> LossInputs:
    if correction is None:
        return inputs
    return replace(inputs, weights=inputs.weights * correction.weights)


def _either(left: torch.Tensor, right: torch.Tensor | None) -> torch.Tensor:
    return left if right is None else left | right


def mismatch(inputs: LossInputs) -> dict[str, torch.Tensor]:
    """Mismatch of trainer and generator on each sampled token: |o - g|, which in a synchronous run
    is the difference of the kernels, and the KL estimate r - log r - 1."""
    generator = required(inputs.generator_logprobs, "mismatch")
    log_ratio = (inputs.logprobs.detach() - generator).clamp(-20.0, 20.0)
    return {
        "mismatch": (inputs.old_logprobs - generator).abs(),
        "mismatch_kl": torch.expm1(log_ratio) - log_ratio,
    }
