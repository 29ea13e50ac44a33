"""`--fork_from <run>[@<step>]`: a new run that starts as a copy of another one's checkpoint.

Everything in the checkpoint is taken over: weights, AdamW's means, the place in the learning-rate
schedule, and the number of steps. So the new run goes on with the next step: it repeats no prompt,
its curves continue those of the other run, and without any change it computes the same to the last
bit. Metrics, rollouts and checkpoints are its own, in a folder of its own.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchtitan_rl.config import RunConfig
from torchtitan_rl.models.archs.registry import ARCHITECTURES
from torchtitan_rl.models.hf import ModelFolderError, read_hf_config
from torchtitan_rl.observability.run_folder import (
    STARTING_MODEL,
    RunFolder,
    RunFolderError,
    describe_runs,
    find_checkpoints,
)

NOT_IN_WEIGHTS = ("rms_norm_eps", "max_position_embeddings", "norm_topk_prob")
"""Fields of a model's config.json that no weight depends on in its shape."""


@dataclass(frozen=True, slots=True)
class Source:
    """The checkpoint that a run is forked from."""

    folder: Path
    """The folder of the other run."""
    step: int

    def name(self, output_dir: str) -> str:
        """What config.json records: `<run>@<step>`, with the run's path if it lies elsewhere."""
        runs = Path(output_dir).absolute()
        run = self.folder.relative_to(runs) if self.folder.is_relative_to(runs) else self.folder
        return f"{run}@{self.step}"


def find_source(fork_from: str, output_dir: str) -> Source:
    """The checkpoint that `--fork_from` names; errors list the runs or the steps there are."""
    run, step = _run_and_step(fork_from)
    found = [place for place in _places(run, output_dir) if (place / "config.json").is_file()]
    if not found:
        raise RunFolderError(f"--fork_from: there is no run {run!r}. {describe_runs(output_dir)}")
    steps = find_checkpoints(found[0] / "checkpoints")
    if not steps:
        raise RunFolderError(f"--fork_from: {os.path.relpath(found[0])} has no checkpoint yet")
    if step is not None and step not in steps:
        raise RunFolderError(
            f"--fork_from: {os.path.relpath(found[0])} has no checkpoint of step {step}; it has "
            f"those of {', '.join(map(str, steps))} (checkpoint.keep says how many are kept)"
        )
    return Source(found[0], steps[-1] if step is None else step)


def _run_and_step(fork_from: str) -> tuple[str, int | None]:
    """The parts of a `--fork_from`.

    Example:
        >>> _run_and_step("sums@20"), _run_and_step("me@home")
        (('sums', 20), ('me@home', None))
    """
    run, _, step = fork_from.rpartition("@")
    return (run, int(step)) if run and step.isdigit() else (fork_from, None)


def _places(run: str, output_dir: str) -> list[Path]:
    """Where a run of that name may be."""
    return [(Path(output_dir) / run).absolute(), Path(run).absolute()]


def _is_same(given: str, recorded: str, output_dir: str) -> bool:
    """Whether a command and a run's folder name the same checkpoint; a command need not name it."""
    (run, step), (known, known_step) = _run_and_step(given), _run_and_step(recorded)
    places = set(_places(run, output_dir)) & set(_places(known, output_dir))
    return not given or (bool(places) and step in (None, known_step))


def resolve_fork(config: RunConfig) -> RunConfig:
    """The config with the step and the starting model that a fork uses; any other as it is.

    A resumed fork keeps what its folder has recorded, so that the command it was started with
    continues it.
    """
    folder = Path(config.output_dir) / config.run_name
    if config.resume:
        recorded = RunFolder(folder, resume=True).read_config()
        source = str(recorded.get("fork_from") or "")
        if not source or not _is_same(config.fork_from, source, config.output_dir):
            return config  # another one is refused as a change of a fixed setting
        return replace(config, fork_from=source, model=config.model or recorded["model"])
    if not config.fork_from:
        return config
    found = find_source(config.fork_from, config.output_dir)
    if config.steps <= found.step:
        raise RunFolderError(
            f"--fork_from: steps ({config.steps}) must be more than the {found.step} steps that "
            f"{os.path.relpath(found.folder)} has done at that checkpoint: a fork goes on counting"
        )
    return replace(
        config, fork_from=found.name(config.output_dir), model=_checked_model(config, found)
    )


def copy_fork(config: RunConfig, folder: RunFolder) -> None:
    """Copy the checkpoint that a run starts from into its folder; does nothing for other runs and
    for one that is resumed."""
    if config.fork_from and not config.resume:
        source = find_source(config.fork_from, config.output_dir)
        folder.copy_checkpoint(source.folder, source.step)


def _checked_model(config: RunConfig, source: Source) -> str:
    """The model of a fork: the one that is set or, in place of a warm start, that of the other run;
    refused if the checkpoint does not fit it."""
    recorded = RunFolder(source.folder, resume=True).read_config()
    theirs = str(recorded.get(STARTING_MODEL) or recorded.get("model") or "")
    if not config.model and not theirs:
        raise RunFolderError(
            f"--fork_from: {os.path.relpath(source.folder)} does not say which model it started "
            "from: name it with --model"
        )
    ours = config.model or theirs
    try:
        left, right = read_hf_config(theirs), read_hf_config(ours)
    except ModelFolderError:  # theirs is gone: the trainer will say if it does not fit
        left, right = {}, read_hf_config(ours)
    if differing := _differing_shapes(left, right):
        raise RunFolderError(
            f"--fork_from: the checkpoint of {os.path.relpath(source.folder)} is of another model "
            f"than {ours}: {'; '.join(differing)}"
        )
    return ours


def _differing_shapes(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """What decides the shapes of weights and is not the same in two models."""
    if not left:
        return []
    kinds = [config["architectures"][0] for config in (left, right)]
    if kinds[0] != kinds[1]:
        return [f"{kinds[0]}, not {kinds[1]}"]
    names = [name for name in ARCHITECTURES[kinds[0]].needed if name not in NOT_IN_WEIGHTS]
    names.append("tie_word_embeddings")
    pairs = [(name, left.get(name), right.get(name)) for name in names]
    return [f"{name} {theirs}, not {ours}" for name, theirs, ours in pairs if theirs != ours]
