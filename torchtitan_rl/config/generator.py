"""Generators: the engine, how completions are sampled, and how many generators there are."""

from dataclasses import dataclass, field

from torchtitan_rl.config.backends import GENERATOR_BACKENDS, check_backend
from torchtitan_rl.config.dtype import Dtype
from torchtitan_rl.config.renames import refuse_old_names
from torchtitan_rl.config.resume import Fixed
from torchtitan_rl.config.sampling import SamplingConfig


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    """Settings of the inference engine."""

    dtype: Dtype = "auto"
    """Number type of the engine; `auto`: float32 on a CPU, bfloat16 on a GPU."""
    max_model_len: Fixed[int] = 512
    """Longest prompt + completion, in tokens."""
    max_num_seqs: int = 256
    """Most completions that are decoded at the same time."""
    max_num_batched_tokens: int = 8192
    """Most tokens in one engine step; bounds how many prompts are prefilled together."""
    block_size: int = 32
    """Tokens per KV-cache block. The prefix cache holds full blocks only."""
    kv_cache_gib: float = 0.5
    """Memory of the KV cache, in GiB."""
    enforce_eager: bool = False
    """Skip torch.compile and CUDA graphs. Always on for a CPU."""
    drain: bool = False
    """Finish requests in flight before new weights are served; otherwise they continue with the
    new weights."""
    return_routed_experts: bool = False
    """Return the experts each token went to, for router replay; mixtures of experts only."""
    can_sleep: bool = False
    """Let the engine give back its memory between uses, by vLLM's sleep mode; `placement colocated`
    switches it on."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "block_size", "kv_cache_gib"):
            if getattr(self, name) <= 0:
                raise ValueError(f"engine.{name} must be positive; got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"engine.max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"engine.max_model_len ({self.max_model_len})"
            )

    def check_room(self, sampling: SamplingConfig, *, where: str) -> None:
        """Refuse completions that leave no room for a prompt; `where` names their settings."""
        if sampling.max_tokens >= self.max_model_len:
            raise ValueError(
                f"{where}.max_tokens ({sampling.max_tokens}) leaves no room for a prompt in "
                f"generator.engine.max_model_len ({self.max_model_len})"
            )


@refuse_old_names("generator")
@dataclass(kw_only=True, slots=True)
class GeneratorConfig:
    """The actors that sample completions."""

    backend: Fixed[str] = "vllm"
    """Kind of generator: vllm, simulated (random tokens, to study scheduling), or
    `package.module:Class` of your own."""
    kwargs: Fixed[dict[str, float | str]] = field(default_factory=dict)
    """Keyword arguments of the backend's class, as names and values: `seconds_per_token 0.01`."""
    replicas: int = 1
    """Number of generators, each on processes and GPUs of its own; one that dies is replaced."""
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(n=8))
    """How training completions are sampled; a call may override it."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    tensor_parallel_degree: int = 1
    """GPUs that share the model of one generator."""
    threads: int = 0
    """CPU threads of each generator; 0 is all cores that the process may use, or with GPUs the
    cores divided by these."""

    def __post_init__(self) -> None:
        check_backend("generator", self.backend, self.kwargs, GENERATOR_BACKENDS)
        if self.replicas < 1:
            raise ValueError(f"generator.replicas must be positive; got {self.replicas}")
        if self.tensor_parallel_degree < 1:
            raise ValueError("generator.tensor_parallel_degree must be at least 1")
        self.engine.check_room(self.sampling, where="generator.sampling")
