"""Slurm from a login node: a batch script that goes on where it was stopped.

`batch_script` makes the script of a run, and `submit_run` hands it to sbatch.
"""

import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torchtitan_rl.config.cluster import SlurmConfig
from torchtitan_rl.hosts.launchers.slurm_commands import SlurmError, ask, file_pattern

ASKED = (
    *("nodes", "partition", "account", "qos", "time", "gpus_per_node", "cpus_per_task", "mem"),
)
"""Settings that are options of sbatch, but for the dashes."""
OWN_OPTIONS = ("--run_name", "--output_dir", "--resume")
"""Settings of the training command that the script sets itself."""


BODY = """\
cd {folder} || exit 1
run={run}
arguments=({arguments})
# A job that starts again, and one that is submitted again, go on where the run is.
if [ -e "$run/config.json" ]; then arguments+=(--resume); fi
echo "job $SLURM_JOB_ID, start $((${{SLURM_RESTART_COUNT:-0}} + 1)), on $SLURM_JOB_NODELIST"

job_state() {{
  scontrol show job --oneliner "$SLURM_JOB_ID" | sed -n 's/.* JobState=\\([A-Z_]*\\).*/\\1/p'
}}

# RUNNING: the time limit comes near, or another job wants the nodes; only this shell is told.
# Otherwise Slurm ends the job: it was cancelled or requeued, or its time is over. Slurm then tells
# all processes, but with cgroups this shell alone; two signals would stop the run at once.
only_this_shell() {{
  [ "$told" = RUNNING ] || scontrol show config | grep -q 'ProctrackType *= proctrack/cgroup'
}}
asked=
told=
on_term() {{
  if [ -n "$asked" ]; then return; fi
  asked=yes  # a second signal may come while Slurm is asked
  told=$(job_state)
  told=${{told:-RUNNING}}  # no answer: rather one signal too many than none
  if only_this_shell; then kill -TERM "$training"; fi
}}
training=
trap on_term TERM

{python} -m torchtitan_rl.train "${{arguments[@]}}" &
training=$!
if [ -n "$told" ]; then kill -TERM "$training"; fi  # told before there was anyone to tell
while kill -0 "$training" 2>/dev/null; do wait "$training"; done  # a signal ends `wait` early
wait "$training"
code=$?

# Only a run that was told to stop by a signal, and did, is to go on: 130 is its exit code, and 143
# that of one which had not begun. One that is done, has failed or was cancelled stays so.
if [ "$told" = RUNNING ] && {{ [ $code = 130 ] || [ $code = 143 ]; }}; then
  trap - TERM
  if [ "$(job_state)" = RUNNING ]; then
    echo "job $SLURM_JOB_ID is to be queued again, and goes on when it starts"
    if scontrol requeue "$SLURM_JOB_ID"; then sleep 60; fi  # Slurm ends this shell
  fi
  echo "job $SLURM_JOB_ID could not be queued again; submit it again to go on"
fi
exit $code
"""


def batch_script(
    job: SlurmConfig,
    arguments: Sequence[str],
    *,
    run_name: str,
    output_dir: Path | str,
    folder: Path | str = "",
    python: str = sys.executable,
) -> str:
    """Text of a batch script that trains, and goes on after the time limit and after preemption.

    The console's output is appended to slurm.log in the run's folder, which must exist when the job
    starts: `log_file` names it.

    Args:
        job: What to ask Slurm for.
        arguments: Arguments of the training command, without --run_name, --output_dir, --resume.
        run_name: Name of the run.
        output_dir: Folder of all runs; all nodes must see it.
        folder: Working folder of the training command; the current one if empty.
        python: Interpreter on the nodes.
    """
    for argument in arguments:
        if argument.partition("=")[0] in OWN_OPTIONS:
            raise SlurmError(
                f"{argument} is set by the batch script: leave it out of the arguments"
            )
    if job.nodes < 1:
        raise SlurmError("cluster.slurm.nodes is 0: say how many nodes to ask for")
    if not run_name:
        raise SlurmError("run_name is empty: a job that is queued again needs it to find its run")
    log = log_file(run_name, output_dir)
    options = [
        f"--job-name={run_name}",
        *options_of(job),
        "--ntasks-per-node=1",
        "--requeue",
        f"--signal=B:TERM@{job.signal_seconds}",
        "--open-mode=append",
        f"--output={file_pattern(log)}",
    ]
    words = [*arguments, "--output_dir", str(log.parents[_depth(run_name)]), "--run_name", run_name]
    for text in (*options, *words, str(folder)):
        if "\n" in text:
            raise SlurmError(f"{text!r} has a line break, which a batch script cannot have")
    body = BODY.format(
        folder=shlex.quote(str(Path(folder).absolute())),
        run=shlex.quote(str(log.parent)),
        arguments=shlex.join(words),
        python=shlex.quote(python),
    )
    directives = "\n".join(f"#SBATCH {_directive(option)}" for option in options)
    return f"#!/usr/bin/env bash\n{directives}\n\n{body}"


def options_of(job: SlurmConfig) -> Iterator[str]:
    """Options of sbatch, without those that every run has."""
    for name in ASKED:
        if value := getattr(job, name):
            yield f"--{name.replace('_', '-')}={value}"
    yield from job.args


def log_file(run_name: str, output_dir: Path | str) -> Path:
    """The file that a job's output is appended to.

    Example:
        >>> log_file("mine", "/shared/outputs")
        PosixPath('/shared/outputs/mine/slurm.log')
    """
    return Path(output_dir).absolute() / run_name / "slurm.log"


def _depth(run_name: str) -> int:
    """How many folders above its log the folder of all runs is, by number of the parent."""
    return len(Path(run_name).parts)


def _directive(option: str) -> str:
    """An option in an #SBATCH line: sbatch splits it as a shell would, and # begins a comment.

    Example:
        >>> _directive("--comment=my run")
        '--comment="my run"'
    """
    name, equals, value = option.partition("=")
    if re.fullmatch(r"[\w@%+=:,./-]*", value, re.ASCII):
        return option
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'{name}{equals}"{escaped}"'


def submit(script: str, *, environment: Mapping[str, str] | None = None) -> int:
    """Hand a batch script to sbatch; returns the job's number."""
    said = ask(["sbatch", "--parsable"], environment=environment, script=script)
    number = said.strip().split("\n")[-1].partition(";")[0]
    if not number.isdigit():
        raise SlurmError(f"sbatch answered {said!r}, which has no job number")
    return int(number)


def submit_run(
    job: SlurmConfig,
    arguments: Sequence[str],
    *,
    run_name: str,
    output_dir: Path | str,
    folder: Path | str = "",
) -> int:
    """Submit a run as `batch_script` makes it; returns the job's number."""
    script = batch_script(job, arguments, run_name=run_name, output_dir=output_dir, folder=folder)
    # Slurm makes no folder: the job would fail, and nobody would be told.
    log_file(run_name, output_dir).parent.mkdir(parents=True, exist_ok=True)
    return submit(script)
