"""A run on Slurm from a login node: the training command submits itself as a batch job."""

from collections.abc import Sequence

from torchtitan_rl.config import RunConfig
from torchtitan_rl.hosts.launchers.slurm_batch import batch_script, log_file, submit_run


def is_to_be_submitted(config: RunConfig) -> bool:
    """Whether a run asks Slurm for nodes, and is not in an allocation already."""
    return config.cluster.launcher == "slurm" and config.cluster.slurm.nodes > 0


def submit(config: RunConfig, arguments: Sequence[str], *, dry: bool) -> int:
    """Submit a run, or print its batch script; returns the exit code.

    Args:
        config: Settings of the run.
        arguments: The training command's, which gave these settings.
        dry: Whether to print the script only.
    """
    job, run = config.cluster.slurm, {"run_name": config.run_name, "output_dir": config.output_dir}
    words = for_the_job(arguments)
    if dry:
        print(batch_script(job, words, **run), end="")
        return 0
    number = submit_run(job, words, **run)
    print(
        f"submitted job {number}; its output: {log_file(**run)}; `scancel {number}` ends it",
        flush=True,
    )
    return 0


def for_the_job(arguments: Sequence[str]) -> list[str]:
    """Arguments with which the job trains in the allocation that it has.

    Example:
        >>> for_the_job(["--config", "mine", "--run_name", "a", "--resume"])
        ['--config', 'mine', '--cluster.slurm.nodes', '0']
    """
    left: list[str] = []
    words = iter(arguments)
    for word in words:
        name = word.partition("=")[0]
        if name in ("--run_name", "--output_dir"):  # the script has its own
            if name == word:
                next(words, None)
        elif word not in ("--dry_run", "--resume", "--no-resume"):
            left.append(word)
    if "--cluster.slurm.nodes" in left:  # the last would count, and the first confuse
        at = left.index("--cluster.slurm.nodes")
        del left[at : at + 2]
    return [*left, "--cluster.slurm.nodes", "0"]
