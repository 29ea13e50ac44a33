"""What is minimised: the policy loss, its reduction, and the KL terms beside it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchtitan_rl.config.correction import CorrectionConfig
from torchtitan_rl.core.plugins import check_keywords, check_limits, check_name, nearest

REDUCTIONS = ("token_mean", "sequence_mean", "prompt_mean", "fixed_length")
"""What weighs the same in a batch; batching/reduction.py computes them."""
KL_ESTIMATORS = ("k1", "abs", "k2", "k3")
"""The functions of algorithms/kl.py by name."""
UNBOUNDED = float("inf")


@dataclass(frozen=True, slots=True)
class BuiltInLoss:
    """What a config must know of a loss of algorithms/policy_loss.py, without importing it."""

    limits: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Keyword arguments of the loss, each with the least and largest value."""
    uses_ratios: bool = True
    """Whether the loss compares the trainer's policy with the generator's or an older one."""
    needs_generator_logprobs: bool = False
    """Whether the loss cannot do without the logprobs recorded at sampling time."""


CLIP: dict[str, tuple[float, float]] = {"clip_low": (0.0, 1.0), "clip_high": (0.0, UNBOUNDED)}

BUILT_IN_LOSSES: dict[str, BuiltInLoss] = {
    "grpo": BuiltInLoss(CLIP),
    "dapo": BuiltInLoss(CLIP),
    # At c = 1 the ceiling would cap the gradient on-policy.
    "dual_clip": BuiltInLoss({**CLIP, "c": (1.01, UNBOUNDED)}),
    "gspo": BuiltInLoss(CLIP),
    "cispo": BuiltInLoss(CLIP),
    "dppo": BuiltInLoss(
        {"delta_low": (0.0, 1.0), "delta_high": (0.0, 1.0)}, needs_generator_logprobs=True
    ),
    "sapo": BuiltInLoss({"tau_positive": (1e-6, 1e6), "tau_negative": (1e-6, 1e6)}),
    "reinforce": BuiltInLoss(uses_ratios=False),
}
"""The losses of algorithms/policy_loss.py; a test compares this table with what they take."""

SEQUENCE_LOSSES = frozenset({"gspo", "sapo"})
"""Losses whose authors average over the tokens of a sequence, then over sequences."""


@dataclass(kw_only=True, slots=True)
class KLConfig:
    """A KL term of the loss."""

    coef: float = 0.0
    """Weight of the KL term; 0 switches it off."""
    estimator: str = "k2"
    """Estimator of the KL: k1, abs, k2 or k3."""

    def __post_init__(self) -> None:
        if not 0 <= self.coef < float("inf"):
            raise ValueError(
                f"the coef of a KL term must be 0 (off) or a positive number; got {self.coef}"
            )
        if self.estimator not in KL_ESTIMATORS:
            raise ValueError(
                f"unknown KL estimator {self.estimator!r}; {nearest(self.estimator, KL_ESTIMATORS)}"
            )

    @property
    def on(self) -> bool:
        """Whether the term is part of the loss."""
        return self.coef > 0

    def notices(self, name: str) -> list[str]:
        """What the user should know about this choice."""
        if self.on and self.estimator == "k1":
            return [
                f"{name}.estimator is k1: as a loss its on-policy gradient has zero expectation, "
                "so it only adds noise; k2 is the usual choice"
            ]
        return []


@dataclass(kw_only=True, slots=True)
class LossConfig:
    """What is minimised: a policy loss by name or import path, and what goes with it."""

    name: str = "grpo"
    """Policy loss: grpo, dapo, dual_clip, gspo, cispo, dppo, sapo, reinforce, or
    `package.module:function` of your own."""
    kwargs: dict[str, float | str] = field(default_factory=dict)
    """Keyword arguments of the loss function, as names and values: `clip_low 0.1 clip_high 0.3`."""
    reduction: str = "token_mean"
    """What weighs the same in the loss. token_mean: every token of the batch. sequence_mean: every
    episode. prompt_mean: every prompt. fixed_length: every token, divided by the number of episodes
    times the most tokens that a rollout may sample."""
    rollout_kl: KLConfig = field(default_factory=KLConfig)
    """KL to the policy that sampled: a soft trust region."""
    ref_kl: KLConfig = field(default_factory=KLConfig)
    """KL to the frozen model that the run started from; needs an actor of its own."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """What to do where trainer and generator disagree on the policy."""
    echo_share: float = 0.2
    """Share of the gradient that Echo may have on average. If it would have more, one factor lowers
    all its alphas. 1: no limit, alphas are used as they are."""

    def __post_init__(self) -> None:
        if check_name(self.name, BUILT_IN_LOSSES, what="loss"):
            limits = BUILT_IN_LOSSES[self.name].limits
            check_keywords(self.name, limits, self.kwargs, what="loss")
            check_limits("loss.kwargs", limits, self.kwargs)
        if self.reduction not in REDUCTIONS:
            raise ValueError(
                f"unknown reduction {self.reduction!r}; {nearest(self.reduction, REDUCTIONS)}"
            )
        if not 0 < self.echo_share <= 1:
            raise ValueError(
                f"loss.echo_share must be in (0, 1], and is 1 to use alphas as they are; got "
                f"{self.echo_share}. To switch Echo off, leave echo out of the task"
            )

    @property
    def built_in(self) -> BuiltInLoss | None:
        """What is known of the policy loss; None: it is the user's own."""
        return BUILT_IN_LOSSES.get(self.name)

    @property
    def uses_ratios(self) -> bool:
        """Whether any part compares the trainer's policy with the generator's or an older one."""
        own = self.built_in is None or self.built_in.uses_ratios
        return own or self.rollout_kl.on or self.correction.on

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the terms that RL minimises; Echo may add one of its own."""
        kl = {"rollout_kl": self.rollout_kl, "ref_kl": self.ref_kl}
        return "policy", *(name for name, term in kl.items() if term.on)

    @property
    def has_kl(self) -> bool:
        """Whether a KL term is on, which trains every sampled token, whatever its advantage."""
        return len(self.terms) > 1

    def needs(self, *, generator_logprobs: bool | None = None) -> dict[str, str]:
        """Optional fields of an episode that must be there, each with the setting that needs it.

        `generator_logprobs` says whether a loss of the user's own needs these, which only trying it
        can tell: see `algorithms.probe.episode_needs`.
        """
        if self.built_in is not None:
            generator_logprobs = self.built_in.needs_generator_logprobs
        found = {}
        for setting, on, name in (
            ("correction", self.correction.on, "token_logprobs"),
            ("rollout_kl", self.rollout_kl.on, "token_logprobs"),
            (f"name {self.name}", generator_logprobs, "token_logprobs"),
            ("ref_kl", self.ref_kl.on, "ref_logprobs"),
        ):
            if on:
                found[name] = f"trainer.loss.{setting}"
        return found

    def notices(self) -> list[str]:
        """What the user should know about these choices."""
        notices = self.rollout_kl.notices("loss.rollout_kl") + self.ref_kl.notices("loss.ref_kl")
        if self.name in SEQUENCE_LOSSES and self.reduction == "token_mean":
            notices.append(
                f"loss.name {self.name} with loss.reduction token_mean: a long answer weighs more "
                "than a short one; its authors average by sequence, as trainer.loss.reduction "
                "sequence_mean does"
            )
        if self.name == "dppo" and self.correction.importance_weight != "off":
            notices.append(
                "loss.name dppo weighs by exp(t - g) already; correction.importance_weight does so "
                "once more"
            )
        return notices
