"""Names that settings had before, and what they are called now.

A command line, a recipe or a saved config.json with an old name is answered with the new one.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)

RENAMED: dict[str, str] = {
    "generator_replicas": "generator.replicas",
    "environment": "rollout.environment",
    "grader": "rollout.grader",
    "thinking": "rollout.thinking",
    "train_from": "rollout.train_from",
    "rollout.holdout_share": "rollout.untrained_share",
    "batch_filter": "trainer.batch_filter",
    "reference": "trainer.reference",
    "check_weights": "trainer.weight_sync.check",
    "save_rollouts": "log.rollouts",
    "save_timeline": "log.timeline",
    "wandb_project": "log.wandb_project",
    "deadline_seconds": "supervision.deadline_seconds",
    "most_untrainable_steps": "supervision.most_untrainable_steps",
    "generator.seconds_per_token": "generator.kwargs.seconds_per_token",
    "generator.seconds_per_pull": "generator.kwargs.seconds_per_pull",
    "generator.failure_rate": "generator.kwargs.failure_rate",
    "generator.death_rate": "generator.kwargs.death_rate",
    "trainer.seconds_per_step": "trainer.kwargs.seconds_per_step",
    "trainer.seconds_per_publish": "trainer.kwargs.seconds_per_publish",
}
"""Dotted names of settings and of whole groups: old → new."""


def new_name(name: str) -> str | None:
    """What a dotted setting is called now; None if it was not renamed.

    Example:
        >>> new_name("environment.timeout_seconds")
        'rollout.environment.timeout_seconds'
    """
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if new := RENAMED.get(".".join(parts[:length])):
            return ".".join([new, *parts[length:]])
    return None


def renamed_flag(argument: str) -> tuple[str, str] | None:
    """An old flag of the command line and its new spelling; None if the argument is no old flag.

    Example:
        >>> renamed_flag("--no_save_rollouts")
        ('--no_save_rollouts', '--log.no_rollouts')
    """
    flag, _, _value = argument.partition("=")
    if not flag.startswith("--"):
        return None
    *groups, last = flag[2:].replace("-", "_").split(".")
    off = last.startswith("no_") and new_name(".".join([*groups, last])) is None
    new = new_name(".".join([*groups, last.removeprefix("no_") if off else last]))
    if new is None:
        return None
    head, _, tail = new.rpartition(".")
    if head.endswith(".kwargs"):
        return flag, f"--{head} {tail} <value>"
    return flag, f"--{head}.{'no_' if off else ''}{tail}"


def refuse_old_names(group: str = "") -> Callable[[Class], Class]:
    """A class decorator: a keyword argument under its old name raises an error that says the new
    one. `group` is where the config stands in a run, such as "rollout"."""
    prefix = f"{group}." if group else ""

    def decorate(cls: Class) -> Class:
        known = _own_names(prefix)
        init: Callable[..., None] = vars(cls)["__init__"]

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            for name in kwargs.keys() & known.keys():
                raise TypeError(
                    f"{cls.__name__}: {name!r} is now {known[name]!r}, counted from the run's "
                    "config (CHANGELOG.md has a table of old and new names)"
                )
            init(self, *args, **kwargs)

        type.__setattr__(cls, "__init__", checked)
        return cls

    return decorate


def _own_names(prefix: str) -> Mapping[str, str]:
    own = {old.removeprefix(prefix): new for old, new in RENAMED.items() if old.startswith(prefix)}
    return {old: new for old, new in own.items() if "." not in old}
