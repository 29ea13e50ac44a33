"""The run, in one file: roll out, score, turn into episodes, train, sync, evaluate.

A step is synchronous: every completion it trains on was sampled with the weights it starts from.
Prompts and seeds derive from the step number alone, so a resumed run continues exactly.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torchtitan.config import Configurable

from torchtitan_rl.actors.engine import SamplingConfig
from torchtitan_rl.actors.spawn import (
    Spawned,
    per_rank,
    spawn_generator,
    spawn_grader,
    spawn_reference,
    spawn_trainer,
    start_monarch,
)
from torchtitan_rl.batching.grid import Grid, deal_groups, grid_metrics, make_grid
from torchtitan_rl.batching.overlong import limit_length
from torchtitan_rl.batching.reduction import weigh
from torchtitan_rl.batching.validation import require, validate
from torchtitan_rl.config import RunConfig
from torchtitan_rl.models.hf import check_experts, check_parallelism, read_hf_config
from torchtitan_rl.models.render import ChatRenderer
from torchtitan_rl.observability.console import (
    StepProgress,
    busy,
    console,
    print_summary,
    step_line,
)
from torchtitan_rl.observability.metrics import flatten, merge_metrics
from torchtitan_rl.observability.rollouts import rollout_metrics
from torchtitan_rl.observability.run_folder import RunFolder
from torchtitan_rl.observability.sinks import MetricsLog
from torchtitan_rl.platform import check_gpus
from torchtitan_rl.rollout import Group, UntrainableSteps, make_episodes
from torchtitan_rl.routing import Experts
from torchtitan_rl.tasks.task import Example, Task
from torchtitan_rl.types import Completion, Episode
from torchtitan_rl.waiting import Clock, Interrupted, answer, together, unless

Answer = TypeVar("Answer")


class Controller(Configurable):
    """Owns the actors and runs the steps.

    Example:
        async with Controller(config) as controller:
            await controller.run()
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RunConfig):
        """What can be set: see config.py."""

    config: Config

    def __init__(self, config: Config) -> None:
        config = self.config = config.resolved()
        if not config.run_name:
            raise ValueError("run_name is empty: name the folder of the run under output_dir")
        check_gpus(sum(map(len, config.gpus)))
        hf_config = read_hf_config(config.model_folder)
        for who, degree in (
            ("trainer", config.trainer.parallelism.tensor_parallel_degree),
            ("generator", config.generator.tensor_parallel_degree),
            ("reference", config.reference.parallelism.tensor_parallel_degree),
        ):
            check_parallelism(hf_config, tensor_parallel=degree, who=who)
        if config.generator.engine.return_routed_experts:
            check_experts(hf_config)
        self.vocab_size: int = hf_config["vocab_size"]
        self.hidden_size: int = hf_config["hidden_size"]
        self.experts = Experts.of(hf_config)
        self.needs = config.needs()
        self.folder = RunFolder(Path(config.output_dir) / config.run_name, resume=config.resume)
        self.task: Task = config.task.build(seed=config.seed)
        self.renderer = ChatRenderer(config.model_folder, thinking=config.thinking)
        self.heldout = self.groups("heldout", self.task.heldout_examples(config.evaluation.prompts))
        self.spawned: list[Spawned] = []
        self.reference: Spawned | None = None
        self.steps_done = 0
        self.policy_version = 0
        self.untrainable = UntrainableSteps(config.most_untrainable_steps)
        self.interrupted = asyncio.Event()

    # ---- the run ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train from the first step not yet done to the last; on Ctrl-C, save and raise."""
        config, first = self.config, self.steps_done
        log = MetricsLog(self.folder.metrics_file, self.folder.tensorboard, first_step=first)
        try:
            with StepProgress("training", total=config.steps, done=first) as progress:
                for step in range(first, config.steps):
                    values = await self.step(step)
                    # Logged before it is saved: a run killed in between repeats the step, and
                    # drops the line, where the other order would lose it.
                    log.write(step, values)
                    progress.advance(step_line(step, values))
                    if self.interrupted.is_set():
                        raise Interrupted
                    if self.steps_done % config.checkpoint.every == 0:
                        await self.save()
            log.write(config.steps, await unless(self.interrupted, self.evaluate()))
        except Interrupted:
            await self.save()
            raise
        finally:
            log.close()
        await self.save()
        await self.export(self.folder.model)
        print_summary(self.folder)

    async def step(self, step: int) -> dict[str, float]:
        """One synchronous step; returns what to log. Interruptible until training starts."""
        clock, stop, config = Clock(), self.interrupted, self.config
        temperature = config.generator.sampling.temperature
        evaluation: dict[str, float] = {}
        if step % config.evaluation.every == 0:
            with clock("evaluate"):
                evaluation = await unless(stop, self.evaluate())
        started = time.perf_counter()

        groups = self.prompts(step)
        with clock("generate"):
            completions = await unless(stop, self.generate(groups))
        with clock("grade"):
            await unless(stop, self.grade(groups, completions))
        episodes = make_episodes(
            groups, config.advantage, task=self.task.name, temperature=temperature
        )
        budget, overlong = config.trainer.tokens_per_microbatch, config.trainer.overlong
        episodes, training = limit_length(episodes, budget, overlong)
        self.untrainable.count(groups, episodes)
        with clock("train"):
            if episodes:
                training |= await self.train(episodes)
        self.steps_done = step + 1
        with clock("sync"):
            if episodes:
                await self.sync_weights()

        seconds = time.perf_counter() - started
        scored = [sample for group in groups for sample in group.scored]
        return {
            **flatten(rollout_metrics(scored, self.task.name)),
            **training,
            **evaluation,
            "episodes": len(episodes),
            "policy_version": self.policy_version,
            **{f"time/{phase}": spent for phase, spent in clock.seconds.items()},
            "time/step": seconds,
            "tokens_per_second": sum(len(c.token_ids) for c in completions) / seconds,
        }

    # ---- the phases of a step -----------------------------------------------------------------

    def prompts(self, step: int) -> list[Group]:
        """The prompt groups of a step, a function of the step number."""
        first = step * self.config.prompts_per_step
        indices = range(first, first + self.config.prompts_per_step)
        return self.groups("train", [self.task.train_example(i) for i in indices], first)

    def groups(self, split: str, examples: list[Example], first: int = 0) -> list[Group]:
        return [
            Group(f"{self.task.name}/{split}/{i}", e, self.renderer.prompt(e.messages))
            for i, e in enumerate(examples, first)
        ]

    async def generate(
        self, groups: list[Group], sampling: SamplingConfig | None = None
    ) -> list[Completion]:
        """All samples of all groups. One call: they enter the engine together, so that a run with
        the same seed decodes the same batches."""
        call = self.generator.actor.generate.call_one(
            [group.prompt_token_ids for group in groups],
            sampling_config=sampling,
            group_ids=[group.id for group in groups],
        )
        return await self.answer("the generator to sample", call)

    async def grade(self, groups: list[Group], completions: list[Completion]) -> None:
        """Give each group its scored completions."""
        members: list[list[Completion]] = [[] for _ in groups]
        for completion in completions:
            members[completion.prompt_idx].append(completion)
        calls = [
            self.grader.actor.score.call_one(
                members[i], group.example.expected_answer, group_id=group.id
            )
            for i, group in enumerate(groups)
        ]
        scores = await self.answer("the grader to score", together(*calls))
        for group, scored in zip(groups, scores, strict=True):
            group.scored = scored

    async def train(self, episodes: list[Episode]) -> dict[str, float]:
        """Optimizer steps on these episodes: one, unless trainer.updates_per_step says more."""
        config = self.config.trainer
        validate(
            episodes,
            vocab_size=self.vocab_size,
            version=self.policy_version,
            experts=self.experts,
        )
        if self.reference:
            episodes = await unless(self.interrupted, self.add_ref_logprobs(episodes))
        require(episodes, self.needs)
        longest, dp_degree = self.config.generator.sampling.max_tokens, config.parallelism.dp_degree
        grids = [
            self.grid(weigh(part, config.loss.reduction, fixed_length=longest), dp_degree)
            for part in deal_groups(episodes, config.updates_per_step)
        ]
        call = self.trainer.actor.train_step.call(*grids)
        metrics = merge_metrics(per_rank(await self.answer("the trainer to train", call)))
        self.policy_version += 1
        return {**flatten(metrics), **grid_metrics(grids)}

    def grid(self, episodes: list[Episode], dp_degree: int) -> Grid:
        return make_grid(
            episodes,
            dp_degree=dp_degree,
            tokens_per_microbatch=self.config.trainer.tokens_per_microbatch,
            share_prompts=self.config.trainer.share_prompts,
            hidden_size=self.hidden_size,
        )

    async def add_ref_logprobs(self, episodes: list[Episode]) -> list[Episode]:
        """The episodes with the logprobs of their tokens under the frozen reference model."""
        assert self.reference is not None
        parallelism = self.config.reference.parallelism
        grid = self.grid(episodes, parallelism.dp_degree)
        call = self.reference.actor.logprobs.call(grid)
        ranks = per_rank(await self.answer("the reference to compute logprobs", call))
        # Ranks that share each layer give the same answer; the first of them is enough.
        rows = grid.read_back(ranks[:: parallelism.tensor_parallel_degree])
        return [replace(e, ref_logprobs=r.tolist()) for e, r in zip(episodes, rows, strict=True)]

    async def sync_weights(self) -> None:
        """Send the trainer's weights to the generator: publish a snapshot, pull its handle."""
        publish = self.trainer.actor.publish_weights.call()
        handle = per_rank(await self.answer("the trainer to publish weights", publish))[0]
        pull = self.generator.actor.pull_weights.call_one(handle)
        self.policy_version = await self.answer("the generator to pull weights", pull)

    async def evaluate(self) -> dict[str, float]:
        """Greedy accuracy and reward on the held-out prompts."""
        greedy = replace(self.config.generator.sampling, n=1, temperature=0.0, logprobs=False)
        await self.grade(self.heldout, await self.generate(self.heldout, greedy))
        scored = [sample for group in self.heldout for sample in group.scored]
        return {
            "eval/accuracy": sum(s.correct for s in scored) / len(scored),
            "eval/reward": sum(s.reward for s in scored) / len(scored),
        }

    async def save(self) -> None:
        """Checkpoint what `steps_done` steps have made, unless that is on disk already."""
        if self.folder.latest_checkpoint() != self.steps_done:
            call = self.trainer.actor.save.call(self.steps_done)
            await self.answer("the trainer to save a checkpoint", call)

    async def export(self, folder: Path) -> None:
        """Write the current weights as an HF folder."""
        call = self.trainer.actor.export_hf.call(str(folder))
        await self.answer("the trainer to export the model", call)

    async def answer(self, what: str, reply: Awaitable[Answer]) -> Answer:
        return await answer(what, reply, deadline_seconds=self.config.deadline_seconds)

    # ---- the actors ---------------------------------------------------------------------------

    async def __aenter__(self) -> "Controller":
        """Write the config, spawn the actors side by side, and give the generator the weights."""
        for change in self.folder.create(self.config.to_dict()):
            console.print(f"changed since the run started: {change}", markup=False)
        start_monarch(self.folder.log_file("monarch"))
        try:
            with busy("starting the actors"):
                starting = self.answer("the actors to start", self._spawn())
                await unless(self.interrupted, starting)
            done = await self.answer("the trainer", self.trainer.actor.steps_done.call())
            self.steps_done = per_rank(done)[0]
            if self.config.resume:
                console.print(f"resuming after {self.steps_done} steps", markup=False)
            await self.sync_weights()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _spawn(self) -> None:
        config, folder = self.config, self.folder
        model = str(config.model_folder)
        trainer_gpus, generator_gpus, reference_gpus = config.gpus
        trainer = self._owned(
            spawn_trainer,
            config.trainer,
            model=model,
            steps=config.steps,
            checkpoint_folder=str(folder.checkpoints),
            keep=config.checkpoint.keep,
            seed=config.seed,
            resume=config.resume,
            gpus=trainer_gpus,
            log_file=folder.log_file("trainer"),
        )
        generator = self._owned(
            spawn_generator,
            config.generator,
            model=model,
            seed=config.seed,
            gpus=generator_gpus,
            log_file=folder.log_file("generator"),
        )
        grader = self._owned(
            spawn_grader,
            config.grader,
            config.task,
            seed=config.seed,
            log_file=folder.log_file("grader"),
        )
        spawning = [trainer, generator, grader]
        if config.has_reference:
            reference = self._owned(
                spawn_reference,
                config.reference,
                model=model,
                gpus=reference_gpus,
                log_file=folder.log_file("reference"),
            )
            spawning.append(reference)
        self.trainer, self.generator, self.grader, *more = await together(*spawning)
        self.reference = more[0] if more else None

    async def _owned(
        self, spawn: Callable[..., Awaitable[Spawned]], *args: Any, **kwargs: Any
    ) -> Spawned:
        spawned = await spawn(*args, **kwargs)
        self.spawned.append(spawned)
        return spawned

    async def __aexit__(self, *_error: object) -> None:
        """Stop every process of the run."""
        await asyncio.gather(*(s.stop() for s in self.spawned), return_exceptions=True)
