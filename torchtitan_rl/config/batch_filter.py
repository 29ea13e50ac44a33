"""A function of the user's own that chooses what trains."""

from dataclasses import dataclass, field

from torchtitan_rl.core.plugins import check_name


@dataclass(kw_only=True, slots=True)
class BatchFilterConfig:
    """A function of your own that chooses what trains."""

    name: str = ""
    """`package.module:function` of a step's episodes that returns those to train on; empty: all."""
    kwargs: dict[str, float | str] = field(default_factory=dict)
    """Keyword arguments of the batch filter."""

    def __post_init__(self) -> None:
        if self.name:
            check_name(self.name, (), what="batch filter")
