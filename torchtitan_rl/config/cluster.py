"""The hosts of a run: who starts workers on them, and which actors live where."""

from dataclasses import dataclass, field
from typing import Literal

Launcher = Literal["auto", "here", "hosts", "ssh", "torchrun", "slurm"]
"""Who starts the workers of a run."""
ROLES = ("trainer", "generator", "reference", "grader", "environment")
"""Kinds of actors that are placed on hosts."""
LONGEST_SIGNAL_SECONDS = 65535
"""What sbatch accepts at most."""


@dataclass(kw_only=True, slots=True)
class RolesConfig:
    """Which hosts each kind of actor lives on, by their numbers in the list of hosts, from 0."""

    trainer: tuple[int, ...] = ()
    """Hosts of the trainer's ranks, an equal share on each. Empty: with GPUs, the first hosts that
    have enough of them; without, as many as can have an equal share."""
    generator: tuple[int, ...] = ()
    """Hosts of the generators, in turn. Empty: all, as long as they have GPUs left."""
    reference: tuple[int, ...] = ()
    """Hosts of the reference's ranks, an equal share on each. Empty: the first."""
    grader: int = 0
    """Host of the grader."""
    environment: int = 0
    """Host of the environment."""

    def of(self, role: str) -> tuple[int, ...]:
        """Numbers of the hosts that are chosen for a role; empty: none is."""
        chosen = getattr(self, role)
        return chosen if isinstance(chosen, tuple) else (chosen,)


@dataclass(kw_only=True, slots=True)
class SlurmConfig:
    """What Slurm is asked for, under the names of sbatch's options; nothing if empty or 0."""

    nodes: int = 0
    """Nodes to ask for. 0: the job is not submitted, but uses the allocation that it runs in."""
    partition: str = ""
    """Partition of the cluster."""
    account: str = ""
    """Account that is charged."""
    qos: str = ""
    """Quality of service."""
    time: str = ""
    """Longest time: `90` (minutes), `24:00:00`, `2-12` (days and hours). The job is queued again at
    its end, and resumes."""
    gpus_per_node: int = 0
    """GPUs of each node."""
    cpus_per_task: int = 0
    """CPUs of each node."""
    mem: str = ""
    """Memory of each node, such as `200G`; `0` is all of it."""
    signal_seconds: int = 300
    """How long before the end of its time the job is told to save and stop. Slurm may tell it up to
    a minute earlier."""
    args: tuple[str, ...] = ()
    """Further options of sbatch, such as `--constraint=h100`."""

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node", "cpus_per_task"):
            if getattr(self, name) < 0:
                raise ValueError(f"slurm.{name} must not be negative; got {getattr(self, name)}")
        if not 1 <= self.signal_seconds <= LONGEST_SIGNAL_SECONDS:
            raise ValueError(
                f"slurm.signal_seconds must be 1 to {LONGEST_SIGNAL_SECONDS}; got "
                f"{self.signal_seconds}"
            )
        for argument in self.args:
            if not argument.startswith("-"):
                raise ValueError(
                    f"slurm.args has {argument!r}, which is no option of sbatch: write "
                    "--name=value, in one word"
                )


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """The hosts of a run. Without any of these settings it runs on this one."""

    launcher: Launcher = "auto"
    """Who starts a worker on each host. `here`: nobody, the run is on this host. `hosts`: you, with
    `torchtitan-rl worker`. `ssh`: this command, by ssh. `torchrun`: torchrun, which starts this
    command on every node. `slurm`: srun. `auto`: torchrun if it has started this command, else
    `hosts` if there are any, else `here`."""
    hosts: tuple[str, ...] = ()
    """Hosts of the run, each a name or an address, with `:<port>` if its worker has not the usual
    one. `--hosts a,b` sets it, and `--ssh a,b` also the launcher."""
    port: int = 0
    """Port of workers that this command starts. 0: any that is free."""
    ssh: str = "ssh"
    """The ssh command, with options of your own: `ssh -i key -p 2222`."""
    secret_file: str = ""
    """File with the secret that workers ask for. Empty: the variable TORCHTITAN_RL_SECRET, or
    ~/.config/torchtitan_rl/secret."""
    roles: RolesConfig = field(default_factory=RolesConfig)
    silence_seconds: float = 15.0
    """A host that has said nothing for so long is lost: its work is done elsewhere, and the
    processes on it end."""
    wait_seconds: float = 600.0
    """How long to wait for hosts: at the start, and when the trainer's are lost."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    def __post_init__(self) -> None:
        if len(set(self.hosts)) < len(self.hosts):
            raise ValueError(f"cluster.hosts names a host twice: {', '.join(self.hosts)}")
        if self.launcher == "ssh" and not self.hosts:
            raise ValueError("cluster.launcher is ssh, and cluster.hosts is empty: --ssh a,b")
        if self.launcher == "hosts" and not self.hosts:
            raise ValueError("cluster.launcher is hosts, and cluster.hosts is empty: --hosts a,b")
        if self.launcher in ("here", "torchrun", "slurm") and self.hosts:
            raise ValueError(
                f"cluster.launcher is {self.launcher}, which finds its hosts by itself: leave "
                "cluster.hosts empty"
            )
        for name in ("silence_seconds", "wait_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"cluster.{name} must be positive; got {getattr(self, name)}")
        if self.silence_seconds < 2:
            raise ValueError(
                f"cluster.silence_seconds is {self.silence_seconds:g}: a busy host may say nothing "
                "for a second; use at least 2"
            )
        if not 0 <= self.port < 65536:
            raise ValueError(f"cluster.port must be a port, 1 to 65535, or 0; got {self.port}")
        for role in ROLES:
            self._check_role(role)

    def _check_role(self, role: str) -> None:
        chosen = self.roles.of(role)
        if len(set(chosen)) < len(chosen) or any(number < 0 for number in chosen):
            raise ValueError(
                f"cluster.roles.{role} is {chosen}: numbers of hosts, each once, counted from 0"
            )
        if self.hosts and any(number >= len(self.hosts) for number in chosen):
            raise ValueError(
                f"cluster.roles.{role} is {chosen}, and there are {len(self.hosts)} hosts: "
                f"numbers 0 to {len(self.hosts) - 1}"
            )
