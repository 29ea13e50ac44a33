"""A function of the user's own that chooses among the episodes of a step."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torchtitan_rl.config.batch_filter import BatchFilterConfig
from torchtitan_rl.core.errors import describe_error
from torchtitan_rl.core.plugins import check_arguments, resolve
from torchtitan_rl.core.types import Episode


class BatchFilter:
    """Calls the configured function, and checks what it returns.

    Example:
        config = BatchFilterConfig(name="my_filters:only_short", kwargs={"tokens": 64})
        kept = BatchFilter(config)(episodes)
    """

    def __init__(self, config: BatchFilterConfig) -> None:
        """Import the function; one that cannot be called as configured is refused."""
        self._name, self._kwargs = config.name, config.kwargs
        if self._name:
            takes = "a list of episodes"
            check_arguments(
                self._name, self._function(), self._kwargs, what="batch filter", takes=takes
            )

    def try_out(self, tasks: Iterable[str]) -> None:
        """Call the function with a few made-up episodes of these tasks: one that cannot work is
        refused before any process starts."""
        try:
            self(trial_episodes(tasks))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{error} (on trial, with episodes that were made up)") from error

    def __call__(self, episodes: list[Episode]) -> list[Episode]:
        """The episodes that are kept; an error of the function, or in what it returns, names it."""
        if not self._name or not episodes:
            return episodes
        try:
            kept = self._function()(list(episodes), **self._kwargs)
        except Exception as error:
            said = describe_error(error, self._name.partition(":")[0])
            raise ValueError(f"batch filter {self._name!r} raised {said}") from error
        self._check(kept, episodes)
        return kept

    def _function(self) -> Callable[..., Any]:
        builtins: dict[str, Callable[..., Any]] = {}
        return resolve(self._name, builtins, what="batch filter")

    def _check(self, kept: Any, episodes: Sequence[Episode]) -> None:
        """Refuse a result in which an episode is twice, or was not given."""
        must = f"batch filter {self._name!r} must return a list of episodes that it was given"
        if not isinstance(kept, list):
            raise TypeError(f"{must}; got {type(kept).__name__}")
        known, seen = {id(episode) for episode in episodes}, set()
        for episode in kept:
            if id(episode) not in known:
                hint = ", a copy or one of its own" if isinstance(episode, Episode) else ""
                raise TypeError(f"{must}; got one with {type(episode).__name__}{hint} in it")
            if id(episode) in seen:
                raise ValueError(f"{must}, each once; got {episode.name} twice")
            seen.add(id(episode))


def trial_episodes(tasks: Iterable[str]) -> list[Episode]:
    """Made-up episodes: of each task two groups of two samples, one right and one wrong."""
    return [
        Episode(
            name=f"{task}/train/{group}/{sample}/0",
            policy_version=0,
            prompt_token_ids=[1, 2],
            token_ids=[3, 4, 5],
            token_logprobs=[-0.5, -1.0, -0.1],
            token_versions=[0, 0, 0],
            reward=float(sample),
            advantage=sample - 0.5,
            task=task,
            group_id=f"{task}/train/{group}",
            loss_mask=[False, False, True, True, True],
        )
        for task in tasks
        for group in range(2)
        for sample in range(2)
    ]
