"""The folder of a run, outputs/<run>/: its files, the checks when it is resumed, and its copy for
a fork."""

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.config.renames import new_name
from torchtitan_rl.core.errors import TorchtitanRLError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class RunFolderError(TorchtitanRLError, ValueError):
    """The run folder cannot be used as asked; the message says what to do instead."""


MOST_NAMED = 10
"""Most runs that an error names."""
STARTING_MODEL = "starting_model"
"""Key of config.json beside the settings: the HF folder that a run started from, which a warm start
may have made."""


class RunFolder:
    """Paths of one run's files.

    Example:
        outputs/<run>/config.json  tokenizer.json  metrics.jsonl  tensorboard/  rollouts/  tokens/
        timeline.json  checkpoints/  model/  logs/  lock
    """

    def __init__(self, path: str | Path, *, resume: bool) -> None:
        self.path = Path(path).absolute()
        self.config_file = self.path / "config.json"
        self.tokenizer_file = self.path / "tokenizer.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self.rollouts = self.path / "rollouts"
        self.tokens = self.path / "tokens"
        self.weights = self.path / "weights"
        self.timeline = self.path / "timeline.json"
        self.logs = self.path / "logs"
        self.model = self.path / "model"
        if self.config_file.exists() and not resume:
            raise RunFolderError(
                f"{self.relative} already holds a run: continue it with --resume, or choose "
                "another --run_name"
            )
        if resume and not self.config_file.exists():
            raise RunFolderError(
                f"--resume found no run in {self.relative}: drop --resume to start it, or give the "
                f"--run_name of the one to continue. {describe_runs(self.path.parent)}"
            )

    @property
    def relative(self) -> str:
        return os.path.relpath(self.path)

    def read_config(self) -> dict[str, Any]:
        """What config.json says; empty if there is none."""
        return json.loads(self.config_file.read_text()) if self.config_file.exists() else {}

    def changes(
        self, config: dict[str, Any], *, fixed: Iterable[str] = (), free: Iterable[str] = ()
    ) -> list[str]:
        """Settings that differ from the run that is resumed. `fixed` are dotted names of settings,
        or of groups of them, that may not differ, and `free` those that may, for the error: see
        config/resume.py."""
        # A run of an earlier version may know a setting under another name.
        before = {new_name(key) or key: value for key, value in _flat(self.read_config()).items()}
        if not before:
            return []
        before.pop(STARTING_MODEL, None)
        after = _flat(json.loads(json.dumps(config)))
        changes = [
            f"{key}: {before.get(key)} → {after.get(key)}"
            for key in sorted(before.keys() | after.keys())
            if before.get(key) != after.get(key) and key != "resume"
        ]
        # The user did not change a setting that is new in the code.
        known = [change for change in changes if change.partition(":")[0] in before]
        kept = tuple(f"{name}{end}" for name in fixed for end in (".", ":"))
        if refused := [change for change in known if change.startswith(kept)]:
            raise RunFolderError(
                f"a resumed run cannot change {'; '.join(refused)}. It may change "
                f"{', '.join(free) or 'nothing else'}. For anything else start a new run from its "
                f"checkpoint: --fork_from {self.relative} --run_name <new name>, without --resume"
            )
        return changes

    def create(
        self,
        config: dict[str, Any],
        *,
        fixed: Iterable[str] = (),
        free: Iterable[str] = (),
        model: Path | None = None,
    ) -> list[str]:
        """Make the folder and write the config; returns the settings that a resumed run has
        changed.

        With the `model` that the run starts from, its path is written too, for forks; and its
        tokenizer is copied, so that the page can decode token ids.
        """
        changes = self.changes(config, fixed=fixed, free=free)
        if model:
            config = {**config, STARTING_MODEL: str(model)}
        self.logs.mkdir(parents=True, exist_ok=True)
        temporary = self.config_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(config, indent=2))
        temporary.rename(self.config_file)
        if model and (model / self.tokenizer_file.name).is_file():
            shutil.copyfile(model / self.tokenizer_file.name, self.tokenizer_file)
        return changes

    def latest_checkpoint(self) -> int | None:
        """Step of the newest complete checkpoint."""
        found = find_checkpoints(self.checkpoints)
        return found[-1] if found else None

    def copy_checkpoint(self, source: Path, step: int) -> None:
        """Take over a checkpoint of the run in the folder `source`, unless this one has it.

        Files are linked where the file system can do that: no run writes to a complete checkpoint,
        and one that removes its own leaves this one as it is.
        """
        name = f"step-{step}"
        if step in find_checkpoints(self.checkpoints):
            return
        temporary = self.checkpoints / f".copy-{step}"  # no name of a checkpoint
        for old in (temporary, self.checkpoints / name):  # an earlier attempt was killed
            shutil.rmtree(old, ignore_errors=True)
        try:
            shutil.copytree(source / "checkpoints" / name, temporary, copy_function=_link_or_copy)
        except OSError as error:
            raise RunFolderError(
                f"the checkpoint {name} of {os.path.relpath(source)} cannot be copied: {error}. A "
                "run that goes on removes old ones (checkpoint.keep): name another, or try again"
            ) from error
        temporary.rename(self.checkpoints / name)

    def forget_steps_from(self, step: int) -> None:
        """Remove rollouts and tokens of steps that a resumed run repeats.

        It may end before it has repeated all of them, and files of the earlier attempt would stay.
        """
        for folder in (self.rollouts, self.tokens):
            for file in folder.glob("step-*.jsonl"):
                number = file.name.removeprefix("step-")[:6]
                if number.isdigit() and int(number) >= step:
                    file.unlink()

    def log_failures(self, step: int, failures: "Sequence[DataclassInstance]") -> None:
        """Append a line for each failed rollout to logs/failures.jsonl."""
        if failures:
            with (self.logs / "failures.jsonl").open("a") as file:
                for failure in failures:
                    file.write(json.dumps({"step": step, **asdict(failure)}) + "\n")

    def log_file(self, who: str) -> str:
        """Path of an actor's log."""
        return str(self.logs / f"{who}.log")


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        value = {str(number): item for number, item in enumerate(value)}
    if not isinstance(value, dict) or prefix.endswith("kwargs"):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else key)
    return flat


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def find_runs(folder: str | Path) -> list[str]:
    """Names of the runs in a folder of runs, the newest first. A `config.json` alone may belong to
    a model: a run has logs, too."""
    found = [
        (file.stat().st_mtime, file.parent.name)
        for file in Path(folder).glob("*/config.json")
        if (file.parent / "logs").is_dir()
    ]
    return [name for _, name in sorted(found, reverse=True)]


def describe_runs(folder: str | Path) -> str:
    """The runs in a folder of runs, in a sentence for an error."""
    runs, where = find_runs(folder), os.path.relpath(folder)
    if not runs:
        return f"There are no runs in {where}"
    more = f", and {len(runs) - MOST_NAMED} more" if len(runs) > MOST_NAMED else ""
    return f"Runs in {where}: {', '.join(runs[:MOST_NAMED])}{more}"


def find_checkpoints(folder: str | Path) -> list[int]:
    """Steps with a complete checkpoint, in order; an incomplete one has no `.metadata` yet."""
    return sorted(
        int(path.parent.name.removeprefix("step-"))
        for path in Path(folder).glob("step-*/.metadata")
    )


def remove_half_checkpoints(folder: str | Path) -> None:
    """Remove checkpoints that were being written when their run was killed. They would count among
    the newest, which are kept, and one that can be loaded would go."""
    for path in Path(folder).glob("step-*"):
        if not (path / ".metadata").exists():
            shutil.rmtree(path, ignore_errors=True)
