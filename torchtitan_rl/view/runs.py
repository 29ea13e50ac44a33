"""Finding runs among folders."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from torchtitan_rl.core.errors import TorchtitanRLError


class NotARun(TorchtitanRLError, ValueError):
    """A folder that holds no run."""


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run. A `config.json` alone may belong to a model."""
    return (
        (folder / "metrics.jsonl").is_file()
        or (folder / "rollouts").is_dir()
        or ((folder / "config.json").is_file() and (folder / "logs").is_dir())
    )


def find_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """The runs among folders and directly inside them, by name.

    Example:
        find_runs([Path("outputs")])  # {"grpo-2": Path("outputs/grpo-2"), ...}, the newest first
    """
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise NotARun(f"{folder} is no folder; give a run's, such as outputs/<run>")
        if is_run(folder):
            found.append(folder)
        elif inside := sorted(filter(is_run, _subfolders(folder)), key=_modified, reverse=True):
            found += inside
        else:
            raise NotARun(
                f"{folder} is no run, nor are the folders in it: a run has a metrics.jsonl or a "
                "folder rollouts/"
            )
    return _named(dict.fromkeys(folder.resolve() for folder in found))


def _subfolders(folder: Path) -> Iterable[Path]:
    return (path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _modified(folder: Path) -> float:
    metrics = folder / "metrics.jsonl"
    return (metrics if metrics.exists() else folder).stat().st_mtime


def _named(folders: Iterable[Path]) -> dict[str, Path]:
    """Folders by name; where two names are equal, with the names of the folders above."""
    named: dict[str, Path] = {}
    for folder in folders:
        parts = 1
        while (name := "/".join(folder.parts[-parts:])) in named:
            parts += 1
        named[name] = folder
    return named
