"""What can be set for a run, and every check that needs no process."""

import importlib.util
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from torchtitan_rl.actors.environment import Environment
from torchtitan_rl.actors.generator import VLLMGenerator
from torchtitan_rl.actors.grader import Grader
from torchtitan_rl.actors.reference import Reference
from torchtitan_rl.actors.trainer import Trainer
from torchtitan_rl.algorithms.advantage import BASELINES, AdvantageConfig
from torchtitan_rl.config.sampling import SamplingConfig
from torchtitan_rl.core.configurable import Configurable
from torchtitan_rl.models.hf import check_experts, check_parallelism, read_hf_config
from torchtitan_rl.rollout.episodes import BatchFilter
from torchtitan_rl.rollout.loop import RolloutConfig
from torchtitan_rl.rollout.stream_plan import StreamConfig
from torchtitan_rl.run.warm_start import WarmStartConfig
from torchtitan_rl.tasks.task import Task


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    """Greedy evaluation on held-out prompts."""

    every: int = 10
    """Evaluate before every so many steps, and after the last."""
    prompts: int = 200
    """Held-out prompts; all there are, where a file has fewer."""

    def __post_init__(self) -> None:
        if self.every < 1 or self.prompts < 1:
            raise ValueError("evaluation.every and evaluation.prompts must be at least 1")


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When to save what a resumed run needs."""

    every: int = 10
    """Save after every so many steps, after the last, and on Ctrl-C."""
    keep: int = 2
    """Newest checkpoints to keep; 0 keeps all."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"checkpoint.every must be at least 1; got {self.every}")
        if self.keep == 1 or self.keep < 0:
            raise ValueError(
                f"checkpoint.keep must be 0 (all) or at least 2, because the newest may be "
                f"half-written; got {self.keep}"
            )


@dataclass(kw_only=True, slots=True)
class RunConfig(Configurable.Config):
    """Everything that can be set for a run; recipes make it as `Controller.Config`."""

    model: str = ""
    """HF folder to start from; empty with a warm start: a folder it makes and caches."""
    warm_start: WarmStartConfig | None = None
    """Makes a starting model by imitation when there is none yet."""
    task: Task.Config
    """What to learn."""
    steps: int = 100
    """Training steps."""
    prompts_per_step: int = 32
    """Prompt groups in one step."""
    generator: VLLMGenerator.Config = field(default_factory=VLLMGenerator.Config)
    """Samples completions."""
    generator_replicas: int = 1
    """Generators, each on processes and GPUs of its own; one that dies is replaced."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Limits of rollouts, and which of them train."""
    environment: Environment.Config = field(default_factory=Environment.Config)
    """Hosts a task's tools; spawned only when a task has any, or answers the model."""
    grader: Grader.Config = field(default_factory=Grader.Config)
    """Calls the task's reward function."""
    trainer: Trainer.Config = field(default_factory=Trainer.Config)
    """Learns."""
    reference: Reference.Config = field(default_factory=Reference.Config)
    """The frozen starting model; spawned only when trainer.loss.ref_kl is on."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """How much better than expected a sample is, from the rewards of its group."""
    batch_filter: BatchFilter = field(default_factory=BatchFilter)
    """Chooses among the episodes of a step."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """When to evaluate, and on how much."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When to save, and how much to keep."""
    thinking: bool = False
    """Leave it to the model whether to think; else its turn starts behind an empty thought."""
    seed: int = 0
    """Of prompts, samples and the starting model."""
    output_dir: str = "outputs"
    """Folder of all runs."""
    run_name: str = ""
    """Folder of this run under output_dir; empty: the recipe's name and the time."""
    resume: bool = False
    """Continue the run in output_dir/run_name from its latest checkpoint."""
    train_from: str = ""
    """Folder of a run whose saved rollouts are trained on, as they were: nothing is generated,
    graded or evaluated."""
    save_rollouts: bool = True
    """Write every rollout to the run's `rollouts` folder, a file a step."""
    save_timeline: bool = True
    """Write what was waited for, and when, to the run's `timeline.json`."""
    wandb_project: str = ""
    """Send the metrics to this project of Weights & Biases too, which must be installed; empty: do
    not."""
    deadline_seconds: float = 1800.0
    """Longest wait for any one answer of an actor."""
    max_offpolicy_steps: int = 0
    """How many training steps the weights that sample may be behind. 0: a step trains on what its
    own weights have sampled, and a run can be repeated to the bit; more: generation goes on while
    the trainer works."""
    check_weights: bool = False
    """After every sync compare each generator's logprobs on a prompt with the trainer's: slow, to
    find out who is wrong."""
    most_untrainable_steps: int = 20
    """Stop after so many steps in a row in which no group had differing rewards."""

    def __post_init__(self) -> None:
        for name in ("steps", "prompts_per_step", "deadline_seconds", "generator_replicas"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        engine = self.generator.engine
        for part in self.task.parts():
            if part.name in ("", "all"):
                raise ValueError(f"a task cannot be named {part.name!r}: metrics use that name")
            own = part.sampling is not None
            self._check_sampling(
                part.sampling or self.generator.sampling,
                where=f"sampling of task {part.name!r}" if own else "generator.sampling",
            )
        if self.rollout.max_seconds > self.deadline_seconds:
            raise ValueError(
                f"rollout.max_seconds ({self.rollout.max_seconds:g}) is more than deadline_seconds "
                f"({self.deadline_seconds:g}), the longest wait for any one answer: raise that"
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
        if self.wandb_project and importlib.util.find_spec("wandb") is None:
            raise ValueError(
                f"wandb_project is {self.wandb_project!r}, but wandb is not installed: leave it "
                "empty, or run .venv/bin/python -m pip install wandb"
            )
        if self.streams:
            _ = self.stream  # which checks its own settings
        if not self.model and self.warm_start is None:
            raise ValueError("model is empty: give the path of an HF folder")

    @property
    def samples_per_prompt(self) -> int:
        """Completions of each prompt, i.e. the size of a group; a task may have its own."""
        return self.generator.sampling.n

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
        if sampling.max_tokens >= self.generator.engine.max_model_len:
            raise ValueError(
                f"{where}.max_tokens ({sampling.max_tokens}) leaves no room for a prompt in "
                f"generator.engine.max_model_len ({self.generator.engine.max_model_len})"
            )

    def sampling_of(self, task: Task.Config) -> SamplingConfig:
        """How a task's completions are sampled, with what the losses need recorded."""
        sampling = task.sampling or self.generator.sampling
        return replace(sampling, logprobs=self.generator.sampling.logprobs)

    def most_sampled_tokens(self, task: Task) -> int:
        """Of one rollout of the task."""
        most = self.sampling_of(task.config).max_tokens
        return (
            min(most * self.rollout.max_turns, self.limits.max_tokens) if task.interactive else most
        )

    @property
    def streams(self) -> bool:
        """Whether groups run by themselves, not all of a step together."""
        rollout = self.rollout
        if self.train_from:
            return False
        return bool(self.max_offpolicy_steps or rollout.oversample or rollout.max_groups_per_step)

    @property
    def stream(self) -> StreamConfig:
        return StreamConfig(
            prompts_per_step=self.prompts_per_step,
            max_offpolicy_steps=self.max_offpolicy_steps,
            max_groups_per_step=self.rollout.max_groups_per_step,
            oversample=self.rollout.oversample,
            timeout_seconds=self.rollout.timeout_seconds,
            deadline_seconds=self.deadline_seconds,
        )

    @property
    def limits(self) -> RolloutConfig:
        """Limits of a rollout, in numbers."""
        most = self.rollout.max_tokens or self.generator.engine.max_model_len
        return replace(self.rollout, max_tokens=most)

    @property
    def gpus(self) -> tuple[range, range, range]:
        """Which GPUs trainer, generator and reference get on a CUDA machine."""
        trainer = self.trainer.parallelism.world_size
        replicas = 0 if self.train_from else self.generator_replicas
        generator = trainer + self.generator.tensor_parallel_degree * replicas
        reference = generator + self.reference.parallelism.world_size * self.has_reference
        return range(trainer), range(trainer, generator), range(generator, reference)

    @property
    def has_reference(self) -> bool:
        return self.trainer.loss.ref_kl.on

    def resolved(self) -> Self:
        """With what a part needs switched on; `notices` says so."""
        sampling, engine = self.generator.sampling, self.generator.engine
        if "generator_logprobs" in self.needs():
            sampling = replace(sampling, logprobs=True)
        if "routed_experts" in self.needs():
            engine = replace(engine, return_routed_experts=True)
        return replace(self, generator=replace(self.generator, sampling=sampling, engine=engine))

    def needs(self) -> dict[str, str]:
        """Optional fields of an episode that must be there, each with the setting that needs it."""
        replay = {"routed_experts": "trainer.router_replay"} if self.trainer.router_replay else {}
        return {**self.trainer.loss.needs(), **replay}

    def checked_model(self) -> dict[str, Any]:
        """The starting model's config.json, if the actors can run it as they are set up."""
        hf_config = read_hf_config(self.model_folder)
        for who, degree in (
            ("trainer", self.trainer.parallelism.tensor_parallel_degree),
            ("generator", self.generator.tensor_parallel_degree),
            ("reference", self.reference.parallelism.tensor_parallel_degree),
        ):
            check_parallelism(hf_config, tensor_parallel=degree, who=who)
        if self.generator.engine.return_routed_experts:
            own = "generator.engine.return_routed_experts"
            check_experts(hf_config, setting=self.needs().get("routed_experts", own))
        return hf_config

    def notices(self) -> list[str]:
        """What the user should know about these settings before the run starts."""
        notices = self.trainer.loss.notices()
        if self.train_from:
            return [
                *notices,
                f"train_from {self.train_from}: its rollouts are trained as they were recorded, "
                "with their advantages, echo weights and those held out; nothing is generated, "
                "graded or evaluated",
            ]
        if self.max_offpolicy_steps and "generator_logprobs" not in self.needs():
            notices.append(
                "with max_offpolicy_steps, tokens of older weights are trained on, and "
                f"{self.trainer.loss.name} counts them as new; trainer.loss.name dppo or "
                "trainer.loss.correction.importance_weight token would not"
            )
        for name, on, what in (
            ("generator_logprobs", self.generator.sampling.logprobs, "the generator's logprobs"),
            ("routed_experts", self.generator.engine.return_routed_experts, "its experts"),
        ):
            if name in self.needs() and not on:
                notices.append(f"{self.needs()[name]} needs {what}: recording is switched on")
        return notices

    @property
    def model_folder(self) -> Path:
        if self.model or self.warm_start is None:
            return Path(self.model).absolute()
        pairs = ((self.generator, VLLMGenerator), (self.trainer, Trainer))
        others = [config._owner for config, real in pairs if config._owner is not real]
        return self.warm_start.folder(
            self.task,
            seed=self.seed,
            thinking=self.thinking,
            stand_ins=[owner.__name__ for owner in others if owner is not None],
        ).absolute()
