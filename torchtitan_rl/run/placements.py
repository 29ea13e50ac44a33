"""Where the actors of a run live: which hosts, how many processes on each, which GPUs of theirs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.hosts.host import Host
from torchtitan_rl.supervision.placement import Placement


class HasHosts(Protocol):
    """Hosts to place actors on, connected or not."""

    def hosts_of(self, role: str) -> list[Host]:
        """The hosts of a role."""
        ...


@dataclass(frozen=True, slots=True)
class Placements:
    """Where the processes of every actor run."""

    trainer: Placement
    generators: list[Placement]
    reference: Placement
    grader: Placement
    environment: Placement

    def used(self, *, environment: bool, reference: bool) -> list[tuple[str, Placement]]:
        """The actors of a run by name, and where they are."""
        return [
            ("trainer", self.trainer),
            *((f"generator {i}", placement) for i, placement in enumerate(self.generators)),
            ("grader", self.grader),
            *([("environment", self.environment)] if environment else []),
            *([("reference", self.reference)] if reference else []),
        ]


def describe(placement: Placement) -> str:
    """A placement in words.

    Example:
        "2 processes on each of node0, node1; GPUs 0 to 1"
    """
    names = ", ".join(host.name for host in placement.hosts)
    count = placement.per_host
    processes = "1 process" if count == 1 else f"{count} processes"
    on = f"on {names}" if len(placement.hosts) == 1 else f"on each of {names}"
    gpus, compute = placement.gpus[0], placement.hosts[0].compute
    if not gpus or compute is None or compute.device == "cpu":
        return f"{processes} {on}"
    seen = f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {gpus[0]} to {gpus[-1]}"
    return f"{processes} {on}; {seen}"


def place_actors(config: RunConfig, cluster: HasHosts) -> Placements:
    """Give each actor its hosts, and there GPUs of its own, in the order trainer, generators,
    reference; or the same to all, if they are colocated."""
    roles, taken = config.cluster.roles, Taken()
    ranks = config.trainer.parallelism.world_size
    trainers = cluster.hosts_of("trainer")
    if not roles.trainer:
        trainers = trainers[: _fewest(trainers, ranks)]
    trainer = taken.place("trainer", trainers, ranks)
    if config.placement == "colocated":
        taken = Taken()
    generating, degree = cluster.hosts_of("generator"), config.generator.tensor_parallel_degree
    # One process each: vLLM starts its own for the ranks of a tensor-parallel model.
    generators: list[Placement] = []
    for _ in range(config.generator.replicas):
        free = [host for host in generating if taken.has_room(host, degree)] or generating
        host = min(free, key=lambda h: sum(p.hosts[0] is h for p in generators))
        generators.append(taken.place("generator", [host], 1, gpus=degree))
    if config.placement == "colocated":
        taken = Taken()
    reference = taken.place(
        "reference", cluster.hosts_of("reference"), config.trainer.reference.parallelism.world_size
    )
    grader, environment = (
        Placement(hosts=tuple(cluster.hosts_of(role))) for role in ("grader", "environment")
    )
    return Placements(trainer, generators, reference, grader, environment)


class Taken:
    """GPUs of each host that have an actor."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def has_room(self, host: Host, gpus: int) -> bool:
        """Whether a host has so many GPUs left; one without any shares its cores instead."""
        if host.compute is None or host.compute.device == "cpu":
            return True
        return self._next.get(host.name, 0) + gpus <= len(host.compute.gpus)

    def place(self, who: str, hosts: Sequence[Host], processes: int, *, gpus: int = 1) -> Placement:
        """The next GPUs of these hosts for an actor; `gpus` are those of one process."""
        if processes % len(hosts):
            raise ValueError(
                f"the {who} has {processes} processes, which {len(hosts)} hosts cannot share "
                f"equally: change cluster.roles.{who}, or its parallelism"
            )
        each, own = gpus * processes // len(hosts), []
        for host in hosts:
            first = self._next.get(host.name, 0)
            self._next[host.name] = first + each
            own.append(range(first, first + each))
        return Placement(processes, tuple(own), tuple(hosts))


def _fewest(hosts: Sequence[Host], ranks: int) -> int:
    """How many hosts share the ranks of an actor if nobody says so: with GPUs, the fewest that have
    enough of them, as they are faster within a host; else as many as can have an equal share."""
    counts = [count for count in range(1, len(hosts) + 1) if ranks % count == 0]
    compute = hosts[0].compute
    if compute is None or compute.device == "cpu":
        return counts[-1]
    enough = [count for count in counts if ranks // count <= len(compute.gpus)]
    return (enough or counts[-1:])[0]


def check_gpus_of_hosts(placements: Placements, *, has_reference: bool) -> None:
    """Refuse hosts with fewer GPUs than what is placed on them needs."""
    needed: dict[str, tuple[Host, int]] = {}
    placed = [placements.trainer, *placements.generators]
    for placement in [*placed, *([placements.reference] if has_reference else [])]:
        for host, gpus in zip(placement.hosts, placement.gpus, strict=True):
            most = max(needed.get(host.name, (host, 0))[1], gpus[-1] + 1 if gpus else 0)
            needed[host.name] = host, most
    for host, most in needed.values():
        compute = host.compute
        if compute and compute.device == "cuda" and len(compute.gpus) < most:
            raise ValueError(
                f"{host} has {len(compute.gpus)} GPUs, and the actors on it need {most}: place "
                "fewer there with cluster.roles, lower their parallelism, or set placement to "
                "colocated"
            )
    devices = {host.compute.device for host, _ in needed.values() if host.compute}
    if len(devices) > 1:
        raise ValueError(
            "some hosts of trainer and generators have GPUs and some have not: place both on hosts "
            "of one kind with cluster.roles"
        )
