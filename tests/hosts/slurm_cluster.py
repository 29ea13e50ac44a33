"""A real Slurm for tests: a controller and some nodes, each on a machine of its own.

Every daemon writes to a folder that only its machine has and that is gone with it; configuration,
key and the output of jobs lie in one temporary folder. Root is needed, and Debian's packages, which
`scripts/cluster_tools.sh` installs.

Example::

    with SlurmCluster(nodes=2) as cluster:
        job = cluster.submit("#!/bin/sh\\nsrun hostname\\n", "--nodes=2")
        cluster.until_state(job, "COMPLETED")
        print(cluster.output(job))
"""

import os
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.hosts.machines import Machine, Machines, how

NEEDED = ("slurmctld", "slurmd", "sbatch", "srun", "munged")
PATIENCE = 90.0
"""Slurm takes some seconds for most things: daemons register, and jobs are looked at in rounds."""

CONFIG = """\
ClusterName=torchtitan_rl
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A job that is queued again waits until its credential is void: 120 s by default.
AuthInfo=socket={own}/munge.socket,cred_expire=5
StateSaveLocation={own}/state
SlurmdSpoolDir={own}/spool
SlurmctldPidFile={own}/slurmctld.pid
SlurmdPidFile={own}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort=6817
SlurmdPort=6818
MpiDefault=none
# Without cgroups, which a container may not write.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# What the machine has counts for nothing: several nodes share it.
SlurmdParameters=config_overrides
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=1
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{more}
ReturnToService=2
# Seconds; the defaults are made for large clusters.
KillWait={kill_wait}
SlurmdTimeout={node_timeout}
SlurmctldTimeout=10
HealthCheckInterval=0
MinJobAge=3600
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace}
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


class SlurmError(AssertionError):
    """Slurm did not do what a test asked for; the message has its words."""


def missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    if how() != "root":
        return "Slurm's daemons need root and namespaces"
    lacks = [
        name
        for name in NEEDED
        if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None
    ]
    return f"{', '.join(lacks)} not found: run scripts/cluster_tools.sh" if lacks else ""


class SlurmCluster:
    """A controller on machine 0 and nodes on the machines after it; running while entered.

    Args:
        nodes: How many nodes.
        cpus: CPUs that each says it has.
        gpus: GPUs that each says it has; no device is behind them.
        kill_wait: Seconds from SIGTERM to SIGKILL of a job that ends.
        grace: Seconds that a job of partition `main` has when one of `urgent` takes its place.
        node_timeout: Seconds until a silent node is down.
        more: Further lines of slurm.conf.
    """

    def __init__(
        self,
        nodes: int = 2,
        *,
        cpus: int = 4,
        gpus: int = 2,
        kill_wait: int = 5,
        grace: int = 10,
        node_timeout: int = 8,
        more: Sequence[str] = (),
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.own = self.folder / "own"
        self.own.mkdir()
        self.machines = Machines(nodes + 1, private=[self.own], names="slurm")
        self.controller: Machine = self.machines[0]
        self.nodes: list[Machine] = self.machines.all[1:]
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: list[tuple[Machine, subprocess.Popen[Any]]] = []
        lines = [
            f"NodeName={node.name} NodeAddr={node.address} NodeHostname={node.name} CPUs={cpus} "
            f"RealMemory=4000 Gres=gpu:{gpus} State=UNKNOWN"
            for node in self.nodes
        ]
        config = CONFIG.format(
            controller=self.controller.name,
            address=self.controller.address,
            own=self.own,
            folder=self.folder,
            nodes="\n".join(lines),
            kill_wait=kill_wait,
            grace=grace,
            node_timeout=node_timeout,
            more="\n".join(more),
        )
        (self.folder / "slurm.conf").write_text(config)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        # Device files that exist everywhere, and that no job opens.
        (self.folder / "gres.conf").write_text(f"Name=gpu File=/dev/tty[1-{gpus}]\n")
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)

    def __enter__(self) -> Self:
        try:
            self.machines.__enter__()
            self._boot(self.controller, ["slurmctld", "-D", "-i"])
            for node in self.nodes:
                self._boot(node, ["slurmd", "-D", "-N", node.name])
            self.until(self.idle, "all nodes are idle")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Turn all machines off and remove every file."""
        self.machines.close()
        for _, daemon in self._daemons:
            daemon.wait(PATIENCE)
        self._daemons.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- machines -------------------------------------------------------------------------------

    def _boot(self, machine: Machine, daemon: Sequence[str]) -> None:
        """Start munged and a daemon of Slurm on a machine."""
        machine.run(["mkdir", "-p", f"{self.own}/state", f"{self.own}/spool"], check=True)
        socket = f"{self.own}/munge.socket"
        munge = ["munged", "--foreground", "--force", f"--key-file={self.folder}/munge.key"]
        munge += [f"--{name}-file={self.own}/munge.{name}" for name in ("pid", "log", "seed")]
        self._start(machine, [*munge, f"--socket={socket}", "--num-threads=2"])
        self.until(
            lambda: machine.run(["test", "-S", socket]).returncode == 0, f"munge of {machine.name}"
        )
        self._start(machine, daemon)

    def _start(self, machine: Machine, command: Sequence[str]) -> None:
        log = (self.folder / f"{machine.name}-{Path(command[0]).name}.out").open("ab")
        with log:
            daemon = machine.start(
                ["env", f"PATH={os.environ['PATH']}:/usr/sbin", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
            )
        self._daemons.append((machine, daemon))

    def kill(self, node: Machine) -> None:
        """Turn a node off at once."""
        node.kill()

    def boot(self, node: Machine) -> None:
        """Turn a node on again."""
        node.boot()
        self._boot(node, ["slurmd", "-D", "-N", node.name])

    # ---- commands -------------------------------------------------------------------------------

    def run(
        self, *command: object, check: bool = True, on: Machine | None = None, **options: Any
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on the controller's machine, or on another."""
        options = {"env": self.environment, "cwd": self.folder, **options}
        done = (on or self.controller).run([str(word) for word in command], **options)
        if check and done.returncode:
            raise SlurmError(f"{command}: exit code {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def submit(self, script: str, *options: object) -> int:
        """Submit a batch script; returns the job's number. What it prints can be read by `output`,
        unless the script says another place."""
        if "#SBATCH --output" not in script:
            options = (f"--output={self.folder}/job-%j.out", *options)
        said = self.run("sbatch", "--parsable", *options, input=script)
        return int(said.stdout.split(";")[0])

    def output(self, job: int) -> str:
        """What a job has written so far; empty before it has."""
        file = self.folder / f"job-{job}.out"
        return file.read_text() if file.exists() else ""

    def job(self, job: int) -> dict[str, str]:
        """What `scontrol show job` says of a job."""
        said = self.run("scontrol", "show", "job", "--oneliner", job).stdout
        return dict(re.findall(r"(\S+?)=(\S*)", said))

    def state(self, job: int) -> str:
        """A job's state: PENDING, RUNNING, COMPLETED, CANCELLED, ..."""
        return self.job(job)["JobState"]

    def until_state(self, job: int, *states: str) -> str:
        """Wait until a job is in one of some states; returns which."""
        self.until(lambda: self.state(job) in states, f"job {job} is {' or '.join(states)}")
        return self.state(job)

    def cancel(self, job: int, *options: object) -> None:
        self.run("scancel", *options, job)

    def requeue(self, job: int) -> None:
        self.run("scontrol", "requeue", job)

    def node_state(self, node: Machine) -> str:
        """A node's state: IDLE, ALLOCATED, MIXED, DOWN, ...; a trailing * says it is silent."""
        return self.run("sinfo", "-h", "-N", "-n", node.name, "-o", "%T").stdout.split()[0]

    def idle(self) -> bool:
        """Whether every node is up and has nothing to do."""
        said = self.run("sinfo", "-h", "-N", "-o", "%N %T", check=False).stdout.split("\n")
        return {line for line in said if line} == {f"{node.name} idle" for node in self.nodes}

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; an error has the ends of the daemons' logs."""
        end = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > end:
                raise SlurmError(f"waited {PATIENCE:.0f} s until {what}\n{self.logs()}")
            time.sleep(0.2)

    def logs(self, lines: int = 8) -> str:
        """The ends of what the daemons have written."""
        files = sorted(self.folder.glob("slurm*-*.out"))
        ends = (f"{f.name}:\n" + "\n".join(f.read_text().splitlines()[-lines:]) for f in files)
        return "\n".join(ends)
