"""Everything that can be set for a run, and the checks that need nothing but the settings.

What needs torch, a model folder or the user's own code is checked by run/checks.py, before any
process starts.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torchtitan_rl.config.advantage import BASELINES, AdvantageConfig
from torchtitan_rl.config.checkpoint import CheckpointConfig
from torchtitan_rl.config.cluster import ClusterConfig
from torchtitan_rl.config.evaluation import EvaluationConfig
from torchtitan_rl.config.generator import GeneratorConfig
from torchtitan_rl.config.log import LogConfig
from torchtitan_rl.config.renames import refuse_old_names
from torchtitan_rl.config.resume import Fixed, NamesRun
from torchtitan_rl.config.rollout import RolloutConfig
from torchtitan_rl.config.sampling import SamplingConfig
from torchtitan_rl.config.stream import StreamConfig
from torchtitan_rl.config.supervision import SupervisionConfig
from torchtitan_rl.config.task import TaskConfig
from torchtitan_rl.config.trainer import TrainerConfig
from torchtitan_rl.config.warm_start import WarmStartConfig
from torchtitan_rl.core.configurable import to_dict


@refuse_old_names()
@dataclass(kw_only=True, slots=True)
class RunConfig:
    """Everything that can be set for a run. A recipe is a function that returns one."""

    model: Fixed[str] = ""
    """HF folder to start from. Empty: the folder that the warm start makes and keeps."""
    warm_start: Fixed[WarmStartConfig | None] = None
    """Makes a starting model by imitation when there is none yet."""
    task: Fixed[TaskConfig]
    """The task to learn: where prompts come from, and what a sample is worth."""
    steps: int = 100
    """Training steps."""
    prompts_per_step: Fixed[int] = 32
    """Prompts, and so groups of samples, in one step."""
    max_offpolicy_steps: Fixed[int] = 0
    """Largest age of the weights that sample, in steps. 0: a step trains on samples of its own
    weights, and a run can be repeated to the bit. More: generation continues while the trainer
    works."""
    seed: Fixed[int] = 0
    """Seed of prompts, samples and the starting model."""
    placement: Literal["separate", "colocated"] = "separate"
    """Which GPUs the actors use. `separate`: trainer and generators each have their own.
    `colocated`: they share them and take turns, so that one GPU is enough: each gives back its
    memory while the other works. On a CPU the same turns save memory."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """The hosts that the actors live on; one, this one, unless it says more."""
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    """The actors that sample completions."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Limits of rollouts, who answers and grades them, and which of them train."""
    advantage: Fixed[AdvantageConfig] = field(default_factory=AdvantageConfig)
    """How advantages are computed from the rewards of a group."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The actor that learns."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """When to evaluate, and on how much."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When to save, and how much to keep."""
    log: LogConfig = field(default_factory=LogConfig)
    """What to write beside metrics and checkpoints."""
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
    """How long to wait for actors, and when to give up."""
    output_dir: NamesRun[str] = "outputs"
    """Folder of all runs."""
    run_name: NamesRun[str] = ""
    """Folder of this run under output_dir; empty: the recipe's name and the time."""
    resume: NamesRun[bool] = False
    """Continue the run in output_dir/run_name from its latest checkpoint."""
    fork_from: Fixed[str] = ""
    """Start from the latest checkpoint of another run or, with `<run>@<step>`, from an earlier
    one, and continue with these settings. `<run>` is a name in output_dir, or a folder."""

    def __post_init__(self) -> None:
        for name in ("steps", "prompts_per_step"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        for part in self.task.parts():
            if part.name in ("", "all"):
                raise ValueError(f"a task cannot be named {part.name!r}: metrics use that name")
            own = part.sampling is not None
            self._check_sampling(
                part.sampling or self.generator.sampling,
                where=f"sampling of task {part.name!r}" if own else "generator.sampling",
            )
        self._check_limits()
        if self.placement == "colocated":
            self._check_colocated()
        if self.streams:
            _ = self.stream  # which checks its own settings
        if not self.model and self.warm_start is None:
            raise ValueError("model is empty: give the path of an HF folder")

    def _check_sampling(self, sampling: SamplingConfig, *, where: str) -> None:
        if sampling.temperature == 0:
            raise ValueError(
                f"{where}.temperature is 0: greedy samples of a prompt are all equal "
                "and teach nothing; use a temperature above 0 (evaluation is greedy anyway)"
            )
        loss = self.trainer.loss
        if sampling.truncates and loss.uses_ratios:
            raise ValueError(
                f"{where}.top_p < 1 or top_k > 0 cuts tokens off, so the recorded "
                f"logprobs are not those the trainer computes, and the ratios of {loss.name!r} "
                "would be biased; use top_p = 1 and top_k = 0, or trainer.loss.name reinforce "
                "without rollout_kl and correction"
            )
        if sampling.n == 1 and self.advantage.name in BASELINES:
            raise ValueError(
                f"with one sample per prompt every {self.advantage.name!r} advantage is 0; use "
                f"{where}.n of 2 or more, or advantage.name 'reward'"
            )
        self.generator.engine.check_room(sampling, where=where)

    def _check_limits(self) -> None:
        """Limits of one group of settings against those of another."""
        engine, deadline = self.generator.engine, self.supervision.deadline_seconds
        if self.rollout.max_seconds > deadline:
            raise ValueError(
                f"rollout.max_seconds ({self.rollout.max_seconds:g}) is more than "
                f"supervision.deadline_seconds ({deadline:g}), the longest wait for any one reply: "
                "raise that"
            )
        if self.rollout.max_tokens > engine.max_model_len:
            raise ValueError(
                f"rollout.max_tokens ({self.rollout.max_tokens}) is more than "
                f"generator.engine.max_model_len ({engine.max_model_len})"
            )
        budget = self.trainer.tokens_per_microbatch
        if budget < engine.max_model_len and self.trainer.overlong == "error":
            raise ValueError(
                f"trainer.tokens_per_microbatch ({budget}) cannot hold one episode of "
                f"generator.engine.max_model_len ({engine.max_model_len}): raise it, or set "
                "trainer.overlong to truncate or drop"
            )
        if self.trainer.updates_per_step > self.prompts_per_step:
            raise ValueError(
                f"trainer.updates_per_step ({self.trainer.updates_per_step}) is more than "
                f"prompts_per_step ({self.prompts_per_step}): each update takes whole groups"
            )

    def _check_colocated(self) -> None:
        """Settings that actors which take turns cannot serve."""
        if self.max_offpolicy_steps:
            raise ValueError(
                f"placement is colocated, and max_offpolicy_steps is {self.max_offpolicy_steps}: "
                "actors that take turns cannot sample while the trainer works; set "
                "max_offpolicy_steps to 0, or placement to separate"
            )
        transport = self.trainer.weight_sync.transport
        if transport not in ("auto", "shm", "relay", "file"):
            raise ValueError(
                f"placement is colocated, and trainer.weight_sync.transport is {transport}: "
                "weights must lie in host memory while trainer and generators change; use auto, "
                "shm, relay or file"
            )

    @property
    def samples_per_prompt(self) -> int:
        """Completions of each prompt, i.e. the size of a group; a task may have its own."""
        return self.generator.sampling.n

    def sampling_of(self, task: TaskConfig) -> SamplingConfig:
        """How a task's completions are sampled, with what the losses need recorded."""
        sampling = task.sampling or self.generator.sampling
        return replace(sampling, logprobs=self.generator.sampling.logprobs)

    def most_sampled_tokens(self, task: TaskConfig, *, interactive: bool) -> int:
        """Most tokens that the model samples in one rollout of the task; `interactive`: it may have
        several turns."""
        most = self.sampling_of(task).max_tokens
        return min(most * self.rollout.max_turns, self.limits.max_tokens) if interactive else most

    @property
    def streams(self) -> bool:
        """Whether groups run by themselves, not all of a step together."""
        rollout = self.rollout
        if rollout.train_from:
            return False
        return bool(self.max_offpolicy_steps or rollout.oversample or rollout.max_groups_per_step)

    @property
    def stream(self) -> StreamConfig:
        """How groups run ahead of their step."""
        return StreamConfig(
            prompts_per_step=self.prompts_per_step,
            max_offpolicy_steps=self.max_offpolicy_steps,
            max_groups_per_step=self.rollout.max_groups_per_step,
            oversample=self.rollout.oversample,
            timeout_seconds=self.rollout.timeout_seconds,
            deadline_seconds=self.supervision.deadline_seconds,
        )

    @property
    def limits(self) -> RolloutConfig:
        """Limits of a rollout, in numbers."""
        most = self.rollout.max_tokens or self.generator.engine.max_model_len
        return replace(self.rollout, max_tokens=most)

    @property
    def colocated(self) -> bool:
        """Whether trainer and generators take turns; a run that samples nothing has no turns."""
        return self.placement == "colocated" and not self.rollout.train_from

    @property
    def gpus(self) -> tuple[range, range, range]:
        """Which GPUs trainer, generator and reference get on a CUDA machine."""
        trainer = self.trainer.parallelism.world_size
        replicas = 0 if self.rollout.train_from else self.generator.replicas
        generators = self.generator.tensor_parallel_degree * replicas
        ranks = self.trainer.reference.parallelism.world_size * self.has_reference
        if self.placement == "colocated":
            return range(trainer), range(generators), range(ranks)
        last = trainer + generators
        return range(trainer), range(trainer, last), range(last, last + ranks)

    @property
    def gpus_needed(self) -> int:
        """GPUs that the actors need, all together."""
        return max(own.stop for own in self.gpus)

    @property
    def could_share_gpus(self) -> bool:
        """Whether they would need fewer with `placement` colocated, which nothing else forbids."""
        return self.placement == "separate" and not self.max_offpolicy_steps

    @property
    def has_reference(self) -> bool:
        """Whether a loss compares with the starting model."""
        return self.trainer.loss.ref_kl.on

    def to_dict(self) -> dict[str, Any]:
        """All settings, as JSON can have them."""
        return to_dict(self)
