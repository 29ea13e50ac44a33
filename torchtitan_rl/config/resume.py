"""Which settings a resumed run must keep, and which it may change: the fields themselves say it."""

import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, TypeVar

T = TypeVar("T")


class _Mark:
    """Marks a field in its annotation."""

    def __init__(self, meaning: str) -> None:
        self._meaning = meaning

    def __repr__(self) -> str:
        return self._meaning


KEPT = _Mark("kept by a resumed run")
NAMES_RUN = _Mark("says which run is meant")

Fixed = Annotated[T, KEPT]
"""Annotates a setting that decides what a run computes, so that `--resume` may not change it. A
group annotated so is fixed as a whole.

Fixed are the model, the task, the objective, how and in which order prompts are sampled, and what
the state on disk was made with. Free are how large, how many and how often: the learning rate,
samples per prompt, steps, evaluations; and everything that says where and how fast it is computed.

Example:
    seed: Fixed[int] = 0
    loss: Fixed[LossConfig] = field(default_factory=LossConfig)
"""

NamesRun = Annotated[T, NAMES_RUN]
"""Annotates a setting that says which run is meant, not how that works: `run_name`."""


def is_fixed(hint: Any) -> bool:
    """Whether an annotation, as `get_type_hints(..., include_extras=True)` has it, is `Fixed`."""
    return KEPT in getattr(hint, "__metadata__", ())


def fixed_settings(config: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of the settings and groups of a config that a resumed run must keep.

    Example:
        >>> list(fixed_settings(SupervisionConfig()))
        []
    """
    for name, value, hint in _hinted(config, prefix):
        if is_fixed(hint):
            yield name
        elif is_dataclass(value):
            yield from fixed_settings(value, f"{name}.")


def free_settings(config: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of the settings that a resumed run may change; a group of which nothing is fixed
    is one name.

    Example:
        >>> list(free_settings(TrainerConfig(), "trainer."))[:3]
        ['trainer.optimizer.lr', 'trainer.optimizer.weight_decay', 'trainer.lr_scheduler.*']
    """
    for name, value, hint in _hinted(config, prefix):
        if is_fixed(hint) or NAMES_RUN in getattr(hint, "__metadata__", ()):
            continue
        if not is_dataclass(value):
            yield name
        elif any(fixed_settings(value)):
            yield from free_settings(value, f"{name}.")
        else:
            yield f"{name}.*"


def _hinted(config: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """Each field of a config: its dotted name, its value and its annotation."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in fields(config):
        yield f"{prefix}{field.name}", getattr(config, field.name), hints[field.name]
