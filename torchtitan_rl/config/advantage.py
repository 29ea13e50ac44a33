"""Which advantage a run uses."""

from dataclasses import dataclass, field

from torchtitan_rl.core.plugins import check_keywords, check_name

BUILT_IN_ADVANTAGES: dict[str, tuple[str, ...]] = {
    "mean_baseline": (),
    "grpo": (),
    "rloo": (),
    "maxrl": (),
    "reward": (),
}
"""The functions of algorithms/advantage.py by name, each with its keyword arguments."""

BASELINES = frozenset(BUILT_IN_ADVANTAGES) - {"reward"}
"""Advantages that compare the samples of a group, so that a group of one teaches nothing."""


@dataclass(kw_only=True, slots=True)
class AdvantageConfig:
    """Which advantage, by name or import path."""

    name: str = "mean_baseline"
    """Advantage: mean_baseline, grpo, rloo, maxrl, reward, or `package.module:function` of your
    own."""
    kwargs: dict[str, float | str] = field(default_factory=dict)
    """Keyword arguments of the advantage function, as names and values: `scale 0.5`."""
    length_penalty: bool = False
    """Among the best answers of a group, reward the shorter ones more."""

    def __post_init__(self) -> None:
        if check_name(self.name, BUILT_IN_ADVANTAGES, what="advantage"):
            known = BUILT_IN_ADVANTAGES[self.name]
            check_keywords(self.name, known, self.kwargs, what="advantage")
