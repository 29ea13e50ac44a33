"""Where the processes of an actor run."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_rl.hosts.host import THIS_HOST, Host


@dataclass(frozen=True, slots=True)
class Placement:
    """Hosts, processes and GPUs of an actor: an equal share of the processes on each host."""

    processes: int = 1
    """Processes on all hosts together."""
    gpus: Sequence[Sequence[int] | None] = (None,)
    """For each host, the numbers of the GPUs that the processes may use; None: all there are."""
    hosts: Sequence[Host] = (THIS_HOST,)

    def __post_init__(self) -> None:
        if self.processes % len(self.hosts):
            raise ValueError(
                f"{self.processes} processes cannot be shared equally by {len(self.hosts)} hosts"
            )

    @property
    def per_host(self) -> int:
        """Processes on each host."""
        return self.processes // len(self.hosts)
