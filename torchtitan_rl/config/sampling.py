"""How completions are sampled: by default, for a task, for a call."""

from dataclasses import dataclass, field

from torchtitan_rl.config.resume import Fixed


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    """How completions are sampled."""

    n: int = 1
    """Samples per prompt."""
    temperature: Fixed[float] = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Fixed[float] = 1.0
    """Keep the smallest set of tokens with this much probability; 1 keeps all."""
    top_k: Fixed[int] = 0
    """Keep this many most probable tokens; 0 keeps all."""
    max_tokens: Fixed[int] = 64
    """Most new tokens of a completion."""
    stop: Fixed[list[str]] = field(default_factory=list)
    """Strings that end a completion, besides the model's own end-of-turn tokens."""

    logprobs: Fixed[bool] = True
    """Record the logprob of every sampled token, which most losses and the mismatch metrics use."""

    def __post_init__(self) -> None:
        checks = {
            "n must be at least 1": self.n >= 1,
            "temperature must be 0 (greedy) or more": 0 <= self.temperature < float("inf"),
            "top_p must be in (0, 1]": 0 < self.top_p <= 1,
            "top_k must be 0 (off) or more": self.top_k >= 0,
            "max_tokens must be at least 1": self.max_tokens >= 1,
        }
        for message, holds in checks.items():
            if not holds:
                raise ValueError(f"sampling.{message}; got {getattr(self, message.split()[0])}")
        if self.temperature == 0 and self.n > 1:
            raise ValueError(
                "sampling.temperature is 0 (greedy), so the n samples of a prompt would be equal; "
                "use a temperature above 0, or n = 1"
            )

    @property
    def truncates(self) -> bool:
        """Whether tokens are cut off, so that recorded logprobs are renormalised over the rest."""
        return self.top_p < 1 or self.top_k > 0
