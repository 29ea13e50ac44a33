"""The whole loss of a microbatch: policy loss, off-policy correction and KL terms, by config."""

from dataclasses import dataclass, field, replace

import torch

from torchtitan_rl.algorithms.correction import (
    Corrected,
    CorrectionConfig,
    correction_weights,
)
from torchtitan_rl.algorithms.kl import ESTIMATORS, KLConfig
from torchtitan_rl.algorithms.policy_loss import (
    LIMITS,
    LOSSES,
    RATIO_FREE,
    LossInputs,
    LossOutput,
    required,
)
from torchtitan_rl.algorithms.probe import check_loss, needs_generator_logprobs
from torchtitan_rl.core.metrics import Mean, Metrics
from torchtitan_rl.core.plugins import check_arguments, nearest, resolve

REDUCTIONS = ("token_mean", "sequence_mean", "prompt_mean", "fixed_length")
"""What may weigh the same in a batch; `batching.reduction.weigh` sets the weights."""


@dataclass(kw_only=True, slots=True)
class LossConfig:
    """What is minimised: a policy loss by name or import path, and what goes with it."""

    name: str = "grpo"
    """grpo, dapo, dual_clip, gspo, cispo, dppo, sapo, reinforce, or `package.module:function` of
    your own."""
    kwargs: dict[str, float | str] = field(default_factory=dict)
    """Keyword arguments of the function, as names and values: `clip_low 0.1 clip_high 0.3`."""
    reduction: str = "token_mean"
    """What weighs the same: token_mean: every token of the batch; sequence_mean: every episode;
    prompt_mean: every prompt; fixed_length: every token, over episodes times the most tokens that a
    rollout may sample."""
    rollout_kl: KLConfig = field(default_factory=KLConfig)
    """KL to the policy that sampled: a soft trust region."""
    ref_kl: KLConfig = field(default_factory=KLConfig)
    """KL to the frozen model the run started from; takes an actor of its own."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """What to do where trainer and generator disagree on the policy."""

    def __post_init__(self) -> None:
        check_arguments(
            self.name, resolve(self.name, LOSSES, what="loss"), self.kwargs, what="loss"
        )
        if self.reduction not in REDUCTIONS:
            raise ValueError(
                f"unknown reduction {self.reduction!r}; {nearest(self.reduction, REDUCTIONS)}"
            )
        if self.name in LOSSES:
            _check_limits(self.kwargs)
        else:
            check_loss(self.name, self.policy_loss, has_reference=self.ref_kl.on)

    def policy_loss(self, inputs: LossInputs) -> LossOutput:
        """The policy loss alone."""
        return resolve(self.name, LOSSES, what="loss")(inputs, **self.kwargs)

    @property
    def uses_ratios(self) -> bool:
        """Whether any part compares the trainer's policy with the generator's or an older one."""
        return self.name not in RATIO_FREE or self.rollout_kl.on or self.correction.on

    def needs(self) -> dict[str, str]:
        """Optional fields of an episode that must be there, each with the setting that needs it."""
        found = {}
        for setting, on, name in (
            ("correction", self.correction.on, "generator_logprobs"),
            ("rollout_kl", self.rollout_kl.on, "generator_logprobs"),
            (f"name {self.name}", needs_generator_logprobs(self.policy_loss), "generator_logprobs"),
            ("ref_kl", self.ref_kl.on, "ref_logprobs"),
        ):
            if on:
                found[name] = f"trainer.loss.{setting}"
        return found

    def notices(self) -> list[str]:
        """What the user should know about these choices."""
        notices = self.rollout_kl.notices("loss.rollout_kl") + self.ref_kl.notices("loss.ref_kl")
        if self.name == "dppo" and self.correction.importance_weight != "off":
            notices.append(
                "loss.name dppo weighs by exp(t - g) already; correction.importance_weight does so "
                "once more"
            )
        return notices


def _check_limits(kwargs: dict[str, float | str]) -> None:
    for name, value in kwargs.items():
        least, largest = LIMITS[name]
        if not isinstance(value, int | float) or not least <= value <= largest:
            allowed = (
                f"from {least:g} up" if largest == float("inf") else f"{least:g} to {largest:g}"
            )
            raise ValueError(f"loss.kwargs.{name} must be a number {allowed}; got {value!r}")


def objective(config: LossConfig, inputs: LossInputs) -> LossOutput:
    """The sum over tokens of everything that is minimised, and the metrics of each term.

    The KL terms take every token, also those that a trust region or a correction leaves out.
    """
    tokens = float(inputs.logprobs.numel())
    correction = _correction(config.correction, inputs)
    policy = config.policy_loss(_weighed(inputs, correction))
    metrics: Metrics = dict(correction.metrics) if correction else {}
    metrics |= {"loss/policy": Mean(policy.loss_sum.item(), tokens), **policy.metrics}
    loss = policy.loss_sum
    for name, kl, other in (
        ("rollout_kl", config.rollout_kl, inputs.generator_logprobs),
        ("ref_kl", config.ref_kl, inputs.ref_logprobs),
    ):
        if kl.on:
            values = ESTIMATORS[kl.estimator](inputs.logprobs - required(other, name))
            loss = loss + kl.coef * inputs.total(values)
            metrics[name] = Mean(values.sum().item(), tokens)
    metrics["loss/total"] = Mean(loss.item(), tokens)
    if correction is None:
        return LossOutput(loss, metrics, policy.high, policy.low)
    high, low = _either(correction.high, policy.high), _either(correction.low, policy.low)
    return LossOutput(loss, metrics, high, low)


def _correction(config: CorrectionConfig, inputs: LossInputs) -> Corrected | None:
    if not config.on:
        return None
    return correction_weights(
        config,
        inputs.old_logprobs,
        required(inputs.generator_logprobs, "loss.correction"),
        inputs.sequence_ids,
    )


def _weighed(inputs: LossInputs, correction: Corrected | None) -> LossInputs:
    if correction is None:
        return inputs
    return replace(inputs, weights=inputs.weights * correction.weights)


def _either(left: torch.Tensor, right: torch.Tensor | None) -> torch.Tensor:
    return left if right is None else left | right


def mismatch(inputs: LossInputs) -> dict[str, torch.Tensor]:
    """How far trainer and generator are apart on each sampled token: |o - g|, which in a
    synchronous run is what the kernels disagree by, and the KL estimate r - log r - 1."""
    generator = required(inputs.generator_logprobs, "mismatch")
    log_ratio = (inputs.logprobs.detach() - generator).clamp(-20.0, 20.0)
    return {
        "mismatch": (inputs.old_logprobs - generator).abs(),
        "mismatch_kl": torch.expm1(log_ratio) - log_ratio,
    }
