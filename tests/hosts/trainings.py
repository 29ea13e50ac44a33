"""Whole runs of the smallest recipe on machines of a test, for the integration suite.

The trainer is on the first host and the generator on the second; weights go through the shared
folder.
"""

import sys
import tempfile
import time
from pathlib import Path

from tests.hosts import ssh_servers
from tests.hosts.machines import Machines
from tests.hosts.slurm_cluster import SlurmCluster, SlurmError, missing
from tests.hosts.ssh_servers import SshServers
from torchtitan_rl.models.makers.tiny import write_tiny_model
from torchtitan_rl.observability.sinks import read_metrics

ROOT = Path(__file__).parents[2]
SMALL = (
    *("--task.answer", "([0-9]+)", "--evaluation.prompts", "32", "--prompts_per_step", "16"),
    *("--trainer.threads", "1", "--generator.threads", "1"),
    *("--cluster.roles.trainer", "0", "--cluster.roles.generator", "1"),
)
PATIENCE = 100.0


def command(folder: Path, *arguments: str, steps: int) -> list[str]:
    """The training command of run `first` in a folder, from a random model."""
    model = folder / "model"
    if not model.exists():
        write_tiny_model(model, seed=0)
    words = ["--config", "grpo_sum_digits_tiny", "--model", str(model), "--steps", str(steps)]
    where = ("--output_dir", str(folder), "--run_name", "first")
    return [sys.executable, "-m", "torchtitan_rl", "train", *words, *where, *SMALL, *arguments]


def check_run(folder: Path, *, steps: int) -> None:
    """A run has all its steps, each once, and a model."""
    rows = read_metrics(folder / "first" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(steps + 1))
    assert (folder / "first" / "model" / "model.safetensors").is_file()


def on_slurm() -> None:
    """A run is submitted, gives way to a more urgent job, resumes after it, and is done."""
    if why := missing():
        raise SlurmError(why)
    user_signal = "SlurmctldParameters=preempt_send_user_signal"
    with (
        tempfile.TemporaryDirectory(prefix="on slurm ") as name,
        SlurmCluster(kill_wait=20, grace=60, more=[user_signal]) as cluster,
    ):
        folder, steps = Path(name), 12
        asked = ("--cluster.launcher", "slurm", "--cluster.slurm.nodes", "2")
        said = cluster.run(*command(folder, *asked, steps=steps), cwd=ROOT).stdout
        job = int(said.split()[2].rstrip(";"))
        log = folder / "first" / "slurm.log"

        def until(text: str) -> None:
            end = time.monotonic() + PATIENCE
            while not log.exists() or text not in log.read_text():
                ended = cluster.state(job) not in ("PENDING", "RUNNING", "COMPLETING")
                if ended or time.monotonic() > end:
                    written = log.read_text() if log.exists() else "nothing"
                    raise AssertionError(f"no {text!r} of a job {cluster.state(job)}: {written}")
                time.sleep(0.2)

        until("step    2")
        assert any("torchtitan-rl generator" in line for line in cluster.nodes[1].commands())
        urgent = cluster.submit("#!/bin/sh\n", "--nodes=2", "--partition=urgent", "--exclusive")
        until("is to be queued again")
        cluster.until_state(urgent, "COMPLETED")
        until(f"step   {steps - 1}")
        cluster.until_state(job, "COMPLETED")
        assert "resuming after" in log.read_text()
        check_run(folder, steps=steps)
        cluster.until(lambda: not torchtitan_rl_on(cluster.nodes), "nothing is left on the nodes")


def by_ssh() -> None:
    """A run starts workers by ssh, and leaves nothing on their machines."""
    if why := ssh_servers.missing():
        raise AssertionError(why)
    with (
        tempfile.TemporaryDirectory(prefix="by ssh ") as name,
        Machines(3) as machines,
        SshServers(machines.all[1:]) as servers,
    ):
        folder, steps = Path(name), 3
        words = command(folder, "--ssh", "machine1,machine2", steps=steps)
        done = machines[0].run(words, env=servers.environment, cwd=ROOT, timeout=PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr
        check_run(folder, steps=steps)
        end = time.monotonic() + 10
        while left := torchtitan_rl_on(machines.all):
            assert time.monotonic() < end, left
            time.sleep(0.1)


def torchtitan_rl_on(machines: list) -> list[str]:
    """Command lines of this library's processes on some machines."""
    found = [line for machine in machines for line in machine.commands()]
    return [line for line in found if "torchtitan-rl" in line or "torchtitan_rl" in line]
