"""The whole loss of a microbatch: policy loss, off-policy correction and KL terms, by config."""

from dataclasses import dataclass, field, replace

import torch

from torchtitan_rl.algorithms.correction import CorrectionConfig, correction_weights
from torchtitan_rl.algorithms.kl import ESTIMATORS, KLConfig
from torchtitan_rl.algorithms.policy_loss import (
    LIMITS,
    LOSSES,
    NEED_GENERATOR_LOGPROBS,
    RATIO_FREE,
    LossInputs,
    LossOutput,
    generator_logprobs,
)
from torchtitan_rl.batching.reduction import REDUCTIONS
from torchtitan_rl.observability.metrics import Distribution, Mean, Metrics
from torchtitan_rl.plugins import check_arguments, nearest, resolve


@dataclass(kw_only=True, slots=True)
class LossConfig:
    """What is minimised: a policy loss by name or import path, and what goes with it."""

    name: str = "grpo"
    """grpo, dapo, dual_clip, gspo, cispo, dppo, sapo, reinforce, or `package.module:function` of
    your own."""
    kwargs: dict[str, float | str] = field(default_factory=dict)
    """Keyword arguments of the function, such as clip_low and clip_high."""
    reduction: str = "token_mean"
    """What weighs the same: token_mean: every token of the batch; sequence_mean: every completion;
    prompt_mean: every prompt; fixed_length: every token, over completions times max_tokens."""
    rollout_kl: KLConfig = field(default_factory=KLConfig)
    """KL to the policy that sampled: a soft trust region."""
    ref_kl: KLConfig = field(default_factory=KLConfig)
    """KL to the frozen model the run started from; takes an actor of its own."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """What to do where trainer and generator disagree on the policy."""

    def __post_init__(self) -> None:
        function = resolve(self.name, LOSSES, what="loss")
        check_arguments(self.name, function, self.kwargs, what="loss")
        if self.reduction not in REDUCTIONS:
            raise ValueError(
                f"unknown reduction {self.reduction!r}; {nearest(self.reduction, REDUCTIONS)}"
            )
        if self.name in LOSSES:
            _check_limits(self.kwargs)
        else:
            probe(self)

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
            (f"name {self.name}", self.name in NEED_GENERATOR_LOGPROBS, "generator_logprobs"),
            ("ref_kl", self.ref_kl.on, "ref_logprobs"),
        ):
            if on:
                found[name] = f"trainer.loss.{setting}"
        return found

    def notices(self) -> list[str]:
        """What the user should know about these choices."""
        return self.rollout_kl.notices("loss.rollout_kl") + self.ref_kl.notices("loss.ref_kl")


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
    corrected, metrics = _corrected(config.correction, inputs)
    policy = resolve(config.name, LOSSES, what="loss")(corrected, **config.kwargs)
    metrics |= {"loss/policy": Mean(policy.loss_sum.item(), tokens), **policy.metrics}
    loss = policy.loss_sum
    for name, kl, other in (
        ("rollout_kl", config.rollout_kl, inputs.generator_logprobs),
        ("ref_kl", config.ref_kl, inputs.ref_logprobs),
    ):
        if kl.on:
            if other is None:
                raise ValueError(f"{name} is on, and these episodes have no logprobs for it")
            values = ESTIMATORS[kl.estimator](inputs.logprobs - other)
            loss = loss + kl.coef * inputs.total(values)
            metrics[name] = Mean(values.sum().item(), tokens)
    if inputs.generator_logprobs is not None:
        metrics |= mismatch(inputs)
    metrics["loss/total"] = Mean(loss.item(), tokens)
    return LossOutput(loss, metrics)


def _corrected(config: CorrectionConfig, inputs: LossInputs) -> tuple[LossInputs, Metrics]:
    if not config.on:
        return inputs, {}
    factors, metrics = correction_weights(
        config,
        inputs.old_logprobs,
        generator_logprobs(inputs, "loss.correction"),
        inputs.sequence_ids,
    )
    return replace(inputs, weights=inputs.weights * factors), metrics


def mismatch(inputs: LossInputs) -> Metrics:
    """How far trainer and generator are apart on the sampled tokens: |o - g|, which in a
    synchronous run is what the kernels disagree by, and the KL estimate r - log r - 1."""
    generator = generator_logprobs(inputs, "mismatch")
    log_ratio = (inputs.logprobs.detach() - generator).clamp(-20.0, 20.0)
    return {
        "mismatch": Distribution.of((inputs.old_logprobs - generator).abs()),
        "mismatch_kl": Distribution.of(torch.expm1(log_ratio) - log_ratio),
    }


def probe(config: LossConfig) -> None:
    """Try a loss function of the user's on a few tokens and on none, before a rank does.

    A loss that breaks on a rank breaks inside a collective, where the others wait for it.
    """
    who = f"loss {config.name!r}"
    function = resolve(config.name, LOSSES, what="loss")
    for tokens in (3, 0):
        inputs = _probe_inputs(tokens)
        try:
            output = function(inputs, **config.kwargs)
        except Exception as error:
            raise ValueError(f"{who} failed on {tokens} tokens: {error!r}") from error
        if not isinstance(output, LossOutput) or not isinstance(output.loss_sum, torch.Tensor):
            raise ValueError(f"{who} must return a LossOutput(loss_sum, metrics); got {output!r}")
        if output.loss_sum.shape != () or not output.loss_sum.isfinite():
            raise ValueError(f"{who} must return a finite scalar loss_sum; got {output.loss_sum}")
        if not output.loss_sum.requires_grad:
            raise ValueError(f"{who}: loss_sum has no gradient; build it from inputs.logprobs")
        for name, metric in output.metrics.items():
            if not hasattr(metric, "merge"):
                raise ValueError(
                    f"{who}: metric {name!r} is {metric!r}; give it as Mean(total, weight) or "
                    "another of torchtitan_rl.observability.metrics, which know how to merge"
                )
    unweighted = replace(_probe_inputs(3), weights=torch.zeros(3))
    if function(unweighted, **config.kwargs).loss_sum.item() != 0:
        raise ValueError(
            f"{who} leaves out inputs.weights, so that reductions and corrections would have no "
            "effect: return LossOutput(inputs.total(loss_per_token))"
        )


def _probe_inputs(tokens: int) -> LossInputs:
    steps = torch.arange(tokens, dtype=torch.float32)
    return LossInputs(
        logprobs=(-0.5 - 0.1 * steps).requires_grad_(),
        old_logprobs=-0.5 - 0.1 * steps,
        advantages=1.0 - steps,
        weights=torch.ones(tokens),
        sequence_ids=torch.arange(tokens) // 2,
        generator_logprobs=-0.6 - 0.1 * steps,
        ref_logprobs=-0.4 - 0.1 * steps,
    )
