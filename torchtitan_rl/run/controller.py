"""The run, in one file: roll out, score, turn into episodes, train, sync, evaluate.

By default a step is synchronous: what it trains on was sampled with the weights it starts from, and
prompts and seeds derive from the step number alone, so a resumed run continues exactly. With
max_offpolicy_steps, rollouts of later steps are under way while one trains.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, TypeVar

from torchtitan_rl.actors.environment import Request, Response
from torchtitan_rl.algorithms.advantage import group_advantages
from torchtitan_rl.algorithms.objective import episode_needs
from torchtitan_rl.batching.grid import Grid, grid_metrics, make_grid, split_groups
from torchtitan_rl.batching.overlong import limit_length
from torchtitan_rl.batching.reduction import weigh
from torchtitan_rl.batching.validation import require, validate
from torchtitan_rl.config.resume import fixed_settings
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.core.metrics import flatten, merge_metrics
from torchtitan_rl.core.types import Episode
from torchtitan_rl.core.waiting import Clock, Interrupted, interruptible
from torchtitan_rl.models.hf import experts_of
from torchtitan_rl.observability.console import (
    StepProgress,
    busy,
    console,
    print_summary,
    step_line,
)
from torchtitan_rl.observability.run_folder import RunFolder
from torchtitan_rl.observability.sinks import open_metrics_log
from torchtitan_rl.observability.timeline import Timeline
from torchtitan_rl.platform.garbage import collect_garbage_rarely
from torchtitan_rl.rollout.batch_filter import BatchFilter
from torchtitan_rl.rollout.episodes import make_batch
from torchtitan_rl.rollout.failures import Failures
from torchtitan_rl.rollout.log import RolloutLog
from torchtitan_rl.rollout.loop import Group, all_scored, roll_out, take_rewards, waited
from torchtitan_rl.rollout.metrics import evaluation_metrics, rollout_metrics
from torchtitan_rl.rollout.prompts import PromptGroups
from torchtitan_rl.rollout.renderer import ChatRenderer
from torchtitan_rl.rollout.replay import open_dump
from torchtitan_rl.rollout.stream import RolloutStream
from torchtitan_rl.run.actor_set import ActorSet
from torchtitan_rl.run.checks import check_code, check_machine, checked_model, resolved
from torchtitan_rl.run.progress_guard import Health
from torchtitan_rl.run.starting_model import model_folder
from torchtitan_rl.run.sync import WeightSync
from torchtitan_rl.supervision.calls import call_with_deadline
from torchtitan_rl.supervision.spawn import per_rank, start_monarch
from torchtitan_rl.tasks.task import Task

Result = TypeVar("Result")


class Controller:
    """Owns the actors and runs the steps.

    Example:
        async with Controller(config) as controller:
            await controller.run()
    """

    Config: TypeAlias = RunConfig

    def __init__(self, config: RunConfig) -> None:
        check_code(config)
        config = self.config = resolved(config)
        if not config.run_name:
            raise ValueError("run_name is empty: name the folder of the run under output_dir")
        check_machine(config)
        hf_config = checked_model(config)
        self.needs = episode_needs(config)
        self.vocab_size: int = hf_config["vocab_size"]
        self.hidden_size: int = hf_config["hidden_size"]
        self.experts = experts_of(hf_config)
        self.folder = RunFolder(Path(config.output_dir) / config.run_name, resume=config.resume)
        self.task: Task = config.task.build(seed=config.seed)
        self.tasks = self.task.members()
        self.batch_filter = BatchFilter(config.trainer.batch_filter)
        self.batch_filter.try_out(self.tasks)
        self.interactive = [name for name, task in self.tasks.items() if task.interactive]
        self.longest = max(
            config.most_sampled_tokens(task.config, interactive=task.interactive)
            for task in self.tasks.values()
        )
        self.renderer = ChatRenderer(model_folder(config), thinking=config.rollout.thinking)
        for task in self.tasks.values():
            task.check()
            if task.tools:
                self.renderer.check_tools(task.name)
        self.groups = PromptGroups(config, self.tasks, self.renderer)
        self.heldout = self.groups.heldout(self.task, config.evaluation.prompts)
        self.dump = open_dump(config, self.tasks, self.renderer, hf_config)
        self.timeline = Timeline(self.folder.timeline if config.log.timeline else None)
        self.actors = ActorSet(
            config, self.folder, interactive=bool(self.interactive), timeline=self.timeline
        )
        probe = self.heldout[0].shown.token_ids
        self.sync = WeightSync(config, self.actors, self.call, self.measure, probe)
        self.steps_done = 0
        self.policy_version = 0
        self.rollout_log = RolloutLog(self.folder.rollouts if config.log.rollouts else None)
        self.stream: RolloutStream[Group] | None = None
        self.health = Health(config.supervision.most_untrainable_steps)
        self.failures = Failures(self.folder, list(self.tasks))
        self.interrupted = asyncio.Event()

    # ---- the run ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train from the first step not yet done to the last; on Ctrl-C, save and raise."""
        config, first = self.config, self.steps_done
        self.folder.forget_steps_from(first)
        log = open_metrics_log(self.folder, config, first_step=first)
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
            if not self.dump:
                log.write(config.steps, await interruptible(self.interrupted, self.evaluate()))
            await self.save()
            await self.export(self.folder.model)
        except Interrupted:
            await self.save()
            raise
        finally:
            log.close()
            self.rollout_log.close()
        print_summary(self.folder)

    async def step(self, step: int) -> dict[str, float]:
        """One step; returns what to log. Interruptible until training starts."""
        clock, stop, config = Clock(), self.interrupted, self.config
        evaluation: dict[str, float] = {}
        if step % config.evaluation.every == 0 and not self.dump:
            with clock("evaluate"):
                evaluation = await interruptible(stop, self.evaluate())
        started = time.perf_counter()

        groups = await interruptible(stop, self.rollouts(step, clock))
        share = config.rollout.untrained_share
        batch = make_batch(groups, config.advantage, untrained_share=share)
        dropped = self.take_dropped()
        # Before anything that may fail: then they are what one wants to look at.
        await self.save_rollouts(step, groups + dropped)
        self.health.check_rollouts(groups)
        budget, overlong = config.trainer.tokens_per_microbatch, config.trainer.overlong
        chosen = self.batch_filter(batch.episodes)
        episodes, training = limit_length(chosen, budget, overlong)
        training["episodes_filtered"] = len(batch.episodes) - len(chosen)
        if batch.unattributed:
            training["echo_unattributed"] = batch.unattributed
        self.health.check_episodes(groups, episodes)
        with clock("train"):
            if heldout := limit_length(batch.heldout, budget, overlong)[0]:
                measured = await interruptible(stop, self.measure(heldout))
                training |= {f"heldout/{name}": value for name, value in measured.items()}
            if episodes:
                training |= await self.train(episodes)
        self.steps_done = step + 1
        with clock("sync"):
            if not self.dump:
                await self.sync.begin(trained=bool(episodes), stream=self.stream)

        seconds = time.perf_counter() - started
        tokens = sum(len(c.rollout.token_ids) for group in groups for c in group.conversations)
        return {
            **flatten(rollout_metrics(all_scored(groups), self.interactive)),
            **self.count_failures(step, groups + dropped),
            **training,
            **self.sync.metrics,
            **evaluation,
            "episodes": len(episodes),
            "policy_version": self.policy_version,
            **{f"time/{phase}": spent for phase, spent in clock.seconds.items()},
            "time/step": seconds,
            "tokens_per_second": tokens / seconds,
        }

    # ---- the phases of a step -----------------------------------------------------------------

    def prompts(self, step: int) -> list[Group]:
        """The prompt groups of a step, a function of the step number."""
        first = step * self.config.prompts_per_step
        indices = range(first, first + self.config.prompts_per_step)
        return self.groups("train", [self.task.train_example(i) for i in indices], first)

    async def rollouts(self, step: int, clock: Clock) -> list[Group]:
        """The graded groups of a step; with a stream, they were started ahead of it."""
        if self.dump:
            with clock("read"):
                return await asyncio.to_thread(self.dump.groups, step)
        if self.stream:
            with clock("generate"):
                return await self.stream.batch(step)
        groups = self.prompts(step)
        with clock("generate"):
            await self.roll_out(groups)
        with clock("grade"):
            await self.grade(groups)
        return groups

    def make_stream(self) -> RolloutStream[Group] | None:
        """None where a step rolls out all its groups together: only so are runs repeatable."""
        config = self.config
        if not config.streams:
            return None

        async def play(group: Group) -> None:
            await self.roll_out([group])
            await self.grade([group])

        return RolloutStream(
            config.stream,
            start=lambda i: self.groups("train", [self.task.train_example(i)], i)[0],
            play=play,
            useful=self.teaches if config.rollout.max_groups_per_step else None,
            first_step=self.steps_done,
            end_step=config.steps,
        )

    def teaches(self, group: Group) -> bool:
        return any(group_advantages(self.config.advantage, group.scored, group.id))

    async def save_rollouts(self, step: int, groups: list[Group]) -> None:
        if self.dump:
            await self.rollout_log.copy(self.dump.file(step))
        else:
            await self.rollout_log.write(step, groups)

    def take_dropped(self) -> list[Group]:
        """Groups that ended since the last step, and are not trained."""
        ended = self.stream.take_untrained() if self.stream else []
        for untrained in ended:
            untrained.work.give_up(untrained.kind, untrained.reason)
        return [untrained.work for untrained in ended]

    def count_failures(self, step: int, groups: list[Group]) -> dict[str, float]:
        """What came to nothing since the last step, by task; each is logged, once."""
        return {**self.failures.of_step(step, groups), **self.actors.take_deaths()}

    async def roll_out(self, groups: list[Group]) -> None:
        """Give each group its rollouts."""
        await roll_out(
            groups,
            sample=self.actors.generators.sample_prompts,
            respond=self.respond,
            renderer=self.renderer,
            limits=self.config.limits,
        )

    async def respond(self, requests: list[Request]) -> list[Response]:
        assert self.actors.environments is not None
        return await self.actors.environments.respond(requests, step=self.steps_done)

    async def grade(self, groups: list[Group]) -> None:
        """Give each group its scored rollouts."""
        alive, asked = [group for group in groups if group.conversations], time.monotonic()
        if not alive:
            raise RuntimeError(groups[0].failures[0].reason)
        ungraded = [group.ungraded for group in alive]
        given = await self.actors.graders.rewards(ungraded, step=self.steps_done)
        for group in alive:
            waited(group.conversations, "grade", since=asked)
        take_rewards(alive, given)

    async def train(self, episodes: list[Episode]) -> dict[str, float]:
        """Optimizer steps on these episodes: one, unless trainer.updates_per_step says more."""
        parts = split_groups(await self.complete(episodes), self.config.trainer.updates_per_step)
        grids = [self.weighed_grid(part) for part in parts]
        call = self.actors.trainer.actor.train_step.call(*grids, step=self.steps_done)
        metrics = merge_metrics(per_rank(await self.call("trainer", "train", call)))
        self.policy_version += 1
        return {**flatten(metrics), **grid_metrics(grids)}

    async def measure(self, episodes: list[Episode]) -> dict[str, float]:
        """What a step on these episodes would measure, without taking it."""
        grid = self.weighed_grid(await self.complete(episodes))
        call = self.actors.trainer.actor.measure.call(grid)
        return flatten(merge_metrics(per_rank(await self.call("trainer", "measure", call))))

    async def complete(self, episodes: list[Episode]) -> list[Episode]:
        """The episodes, checked, with everything the losses need."""
        validate(
            episodes,
            vocab_size=self.vocab_size,
            # Another trainer's count: it may have trained a step that this one leaves out.
            version=None if self.dump else self.policy_version,
            experts=self.experts,
        )
        if self.actors.references:
            episodes = await interruptible(self.interrupted, self.add_ref_logprobs(episodes))
        require(episodes, self.needs)
        return episodes

    def weighed_grid(self, episodes: list[Episode]) -> Grid:
        config = self.config.trainer
        weighed = weigh(episodes, config.loss.reduction, fixed_length=self.longest)
        return self.grid(weighed, config.parallelism.dp_degree)

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
        assert self.actors.references is not None
        parallelism = self.config.trainer.reference.parallelism
        grid = self.grid(episodes, parallelism.dp_degree)
        ranks = await self.actors.references.logprobs(grid, step=self.steps_done)
        # Ranks that share each layer give the same answer; the first of them is enough.
        rows = grid.read_back(ranks[:: parallelism.tensor_parallel_degree])
        return [replace(e, ref_logprobs=r.tolist()) for e, r in zip(episodes, rows, strict=True)]

    async def evaluate(self) -> dict[str, float]:
        """Greedy accuracy and reward of the newest weights on the held-out prompts."""
        await self.sync.done()
        await self.roll_out(self.heldout)
        await self.grade(self.heldout)
        await self.rollout_log.write(self.steps_done, self.heldout, split="evaluation")
        failed = self.failures.of_evaluation(self.steps_done, self.heldout)
        return {**evaluation_metrics(all_scored(self.heldout)), **failed}

    async def save(self) -> None:
        """Checkpoint what `steps_done` steps have made, unless that is on disk already."""
        if self.folder.latest_checkpoint() != self.steps_done:
            call = self.actors.trainer.actor.save.call(self.steps_done)
            await self.call("trainer", "save a checkpoint", call)

    async def export(self, folder: Path) -> None:
        """Write the current weights as an HF folder."""
        call = self.actors.trainer.actor.export_hf.call(str(folder))
        await self.call("trainer", "export the model", call)

    async def call(self, who: str, what: str, reply: Awaitable[Result]) -> Result:
        """Wait for an actor: not for ever, and to be seen in the timeline."""
        deadline = self.config.supervision.deadline_seconds
        with self.timeline.span(who, what, step=self.steps_done):
            return await call_with_deadline(
                f"the {who} to {what}", reply, deadline_seconds=deadline
            )

    # ---- the actors ---------------------------------------------------------------------------

    async def __aenter__(self) -> "Controller":
        """Write the config, spawn the actors side by side, and give the generator the weights."""
        config = self.config
        for change in self.folder.create(
            config.to_dict(), fixed=fixed_settings(config), model=model_folder(config)
        ):
            console.print(f"changed since the run started: {change}", markup=False)
        start_monarch(self.folder.log_file("monarch"))
        try:
            with busy("starting the actors"):
                starting = self.call("actors", "start", self.actors.start())
                await interruptible(self.interrupted, starting)
            done = self.actors.trainer.actor.steps_done.call()
            self.steps_done = per_rank(await self.call("trainer", "say its step", done))[0]
            if self.config.resume:
                console.print(f"resuming after {self.steps_done} steps", markup=False)
            self.policy_version = await self.sync.now()
            self.stream = self.make_stream()
            collect_garbage_rarely()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Stop every process of the run."""
        if self.stream:
            with contextlib.suppress(TimeoutError):  # what does not end now, ends with the actors
                await self.stream.close()
            self.count_failures(self.steps_done, self.take_dropped())  # why, if that was the end
        await self.sync.close()
        await self.actors.stop()
        self.timeline.close()
