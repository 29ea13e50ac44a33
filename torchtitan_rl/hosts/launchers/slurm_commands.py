"""Commands of Slurm, and errors in their words."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchtitan_rl.hosts.launchers.launcher import LaunchError

ANSWER_SECONDS = 120
"""How long a command may take: a busy cluster's controller makes it wait."""


class SlurmError(LaunchError, ValueError):
    """Slurm cannot do what was asked; the message says why, in Slurm's words if it has any."""


def not_found(command: str) -> SlurmError:
    return SlurmError(
        f"{command} was not found: Slurm's commands are on the login nodes of a cluster, and on "
        "its compute nodes; name the machines with --hosts where there is no Slurm"
    )


def ask(
    command: Sequence[str], *, environment: Mapping[str, str] | None, script: str | None = None
) -> str:
    """What a command of Slurm prints; an error has its words."""
    try:
        done = subprocess.run(
            command,
            input=script,
            stdin=subprocess.DEVNULL if script is None else None,
            capture_output=True,
            text=True,
            env=None if environment is None else dict(environment),
            timeout=ANSWER_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} has not answered for {ANSWER_SECONDS} s") from None
    except FileNotFoundError:
        raise not_found(command[0]) from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise SlurmError(f"{command[0]} failed with exit code {done.returncode}: {said}")
    return done.stdout


def file_pattern(path: Path) -> str:
    """A path as a file name for Slurm, in which % stands for something."""
    return str(path).replace("%", "%%")
