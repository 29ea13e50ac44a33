"""How many ranks share a model, and how."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class Parallelism:
    """Degrees of parallelism under torchtitan's names; their product is the number of processes."""

    data_parallel_replicate_degree: int = 1
    """Copies of the sharded model (HSDP)."""
    data_parallel_shard_degree: int = 1
    """Ranks that share one copy of the weights (FSDP2)."""
    tensor_parallel_degree: int = 1
    """Ranks that share each layer."""
    expert_parallel_degree: int = 1
    """Ranks that share the experts of a layer, each with whole experts of its own; tokens travel to
    them. It divides data_parallel_shard_degree, whose ranks these are, and the number of experts.
    Not with tensor parallelism."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"parallelism.{name} must be at least 1")
        if self.expert_parallel_degree == 1:
            return
        if self.data_parallel_shard_degree % self.expert_parallel_degree:
            raise ValueError(
                f"parallelism.expert_parallel_degree ({self.expert_parallel_degree}) must divide "
                f"parallelism.data_parallel_shard_degree ({self.data_parallel_shard_degree}): the "
                "experts are shared among the ranks that share the weights"
            )
        if self.tensor_parallel_degree > 1:
            raise ValueError(
                "parallelism.expert_parallel_degree works without tensor parallelism only: "
                "torchtitan would cut each row of tokens into tensor_parallel_degree equal parts, "
                "and rows have any length. Set tensor_parallel_degree to 1"
            )

    @property
    def dp_degree(self) -> int:
        """Ranks that see different data."""
        return self.data_parallel_replicate_degree * self.data_parallel_shard_degree

    @property
    def world_size(self) -> int:
        return self.dp_degree * self.tensor_parallel_degree
