"""The run, in one file: roll out, grade, annotate, turn into episodes, train, sync, evaluate.

    PromptGroup ─roll out─► RolloutGroup ─grade─► ScoredGroup ─annotate─► RolloutRecord ─┐
        ▲      generators,              grader              advantages,                 │
        │      environment                                  echo weights                │
        │                          saved runs (rollout.train_from) ─► RolloutRecord ────┤
        │                                                                               │
      weights ◄─sync── Trainer ◄─── Grid of microbatches ◄─── Episode ◄──make_batch─────┤
                                                                                        │
                                  rollout log, metrics, failures, progress guard ◄──────┘

Each stage takes values and returns new ones; everything after `annotate` is a function of records.

By default a step is synchronous: it trains on samples of the weights that it starts with. Prompts
and seeds depend only on the run's seed and the step number, and a resumed run continues exactly.
With max_offpolicy_steps, rollouts of later steps run while one step trains.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from torchtitan_rl.actors.interfaces import EnvironmentRequest, EnvironmentResponse
from torchtitan_rl.algorithms.objective import episode_needs
from torchtitan_rl.batching.grid import Grid, grid_metrics, make_grid, split_groups, weighed_grid
from torchtitan_rl.batching.overlong import limit_length
from torchtitan_rl.batching.validation import require, validate
from torchtitan_rl.config.cluster import ClusterConfig
from torchtitan_rl.config.resume import fixed_settings, free_settings
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.core.errors import noting
from torchtitan_rl.core.metrics import flatten, merge_metrics
from torchtitan_rl.core.types import Episode
from torchtitan_rl.core.waiting import Clock, Interrupted, as_task, cancel, interruptible
from torchtitan_rl.hosts.cluster import Cluster
from torchtitan_rl.models.hf import experts_of
from torchtitan_rl.observability.console import (
    StepProgress,
    busy,
    console,
    print_summary,
    step_line,
)
from torchtitan_rl.observability.run_folder import RunFolder
from torchtitan_rl.observability.run_lock import RunLock
from torchtitan_rl.observability.sinks import open_metrics_log, read_metrics
from torchtitan_rl.observability.timeline import Timeline
from torchtitan_rl.platform.garbage import rare_collections
from torchtitan_rl.rollout.batch_filter import BatchFilter
from torchtitan_rl.rollout.discards import take_discarded_records
from torchtitan_rl.rollout.episodes import annotate, has_signal, make_batch
from torchtitan_rl.rollout.failures import FailureReporter
from torchtitan_rl.rollout.grading import grade
from torchtitan_rl.rollout.groups import PromptGroup, RolloutGroup, ScoredGroup
from torchtitan_rl.rollout.log import RolloutLog
from torchtitan_rl.rollout.loop import RolloutLoop
from torchtitan_rl.rollout.metrics import evaluation_metrics, failure_metrics, rollout_metrics
from torchtitan_rl.rollout.prompts import PromptGroups
from torchtitan_rl.rollout.record import RolloutRecord, evaluation_records
from torchtitan_rl.rollout.renderer import ChatRenderer
from torchtitan_rl.rollout.replay import open_replay
from torchtitan_rl.rollout.samples import SampleReporter
from torchtitan_rl.rollout.stream import RolloutStream
from torchtitan_rl.run.actor_set import ActorSet
from torchtitan_rl.run.checks import check_code, check_machine, checked_model, resolved
from torchtitan_rl.run.collapse_guard import CollapseGuard
from torchtitan_rl.run.fork import copy_fork, resolve_fork
from torchtitan_rl.run.progress_guard import ProgressGuard
from torchtitan_rl.run.starting_model import model_folder
from torchtitan_rl.run.sync import WeightSync
from torchtitan_rl.run.tool_guard import ToolGuard
from torchtitan_rl.run.turns import Turns
from torchtitan_rl.supervision.calls import HostGoneError, call_with_deadline
from torchtitan_rl.supervision.ranks import call_ranks
from torchtitan_rl.supervision.spawn import per_rank, start_monarch
from torchtitan_rl.tasks.trial import build_task

Result = TypeVar("Result")
LOOK_SECONDS = 1.0
"""How often it is looked whether the trainer's hosts are there, while a step is made."""


class Controller:
    """Owns the actors and runs the steps.

    Example:
        async with Controller(config) as controller:
            await controller.run()
    """

    Config: TypeAlias = RunConfig

    def __init__(
        self, config: RunConfig, *, lock: RunLock | None = None, cluster: Cluster | None = None
    ) -> None:
        """`lock` is the run folder's, if the caller has acquired it already, who releases it.
        `cluster` has the hosts of the run, connected; without one, it is on this host."""
        check_code(config)
        if not config.run_name:
            raise ValueError("run_name is empty: name the folder of the run under output_dir")
        config = self.config = resolved(resolve_fork(config))
        check_machine(config)
        hf_config = checked_model(config)
        self.needs = episode_needs(config.trainer)
        self.vocab_size: int = hf_config["vocab_size"]
        self.experts = experts_of(hf_config)
        self.make_grid = partial(
            make_grid,
            tokens_per_microbatch=config.trainer.tokens_per_microbatch,
            share_prompts=config.trainer.share_prompts,
            hidden_size=hf_config["hidden_size"],
        )
        self.folder = RunFolder(Path(config.output_dir) / config.run_name, resume=config.resume)
        self.lock, self.owns_lock = lock or RunLock(self.folder.path), lock is None
        self.task = build_task(config.task, seed=config.seed)
        self.tasks = self.task.members()
        self.batch_filter = BatchFilter(config.trainer.batch_filter)
        self.batch_filter.try_out(self.tasks)
        self.interactive = [name for name, task in self.tasks.items() if task.interactive]
        self.longest = max(
            config.most_sampled_tokens(task.config, interactive=task.interactive)
            for task in self.tasks.values()
        )
        self.weighed_grid = partial(
            weighed_grid,
            config=config.trainer,
            hidden_size=hf_config["hidden_size"],
            fixed_length=self.longest,
        )
        self.renderer = ChatRenderer(model_folder(config), thinking=config.rollout.thinking)
        for task in self.tasks.values():
            if task.tools:
                self.renderer.check_tools(task.name)
        self.groups = PromptGroups(config, self.tasks, self.renderer)
        self.heldout = self.groups.heldout(self.task, config.evaluation.prompts)
        self.replay = open_replay(config, self.tasks, hf_config)
        self.timeline = Timeline(self.folder.timeline if config.log.timeline else None)
        self.cluster = cluster or Cluster(ClusterConfig(), run=config.run_name)
        self.actors = ActorSet(
            config,
            self.folder,
            interactive=bool(self.interactive),
            cluster=self.cluster,
            timeline=self.timeline,
        )
        probe = self.heldout[0].shown.token_ids
        self.turns = Turns(self.actors, self.call, colocated=config.colocated)
        self.sync = WeightSync(
            config, self.actors, self.call_trainer, self.turns, self.measure, probe
        )
        self.steps_done = 0
        self.longest_training = 0.0
        self.policy_version = 0
        self.rollout_log = RolloutLog(self.folder.rollouts if config.log.rollouts else None)
        self.stream: RolloutStream[RolloutLoop, list[RolloutRecord]] | None = None
        self.guard = ProgressGuard(config.supervision.most_untrainable_steps)
        self.tool_guard = ToolGuard(config.supervision)
        self.collapse_guard = CollapseGuard(config, self.folder)
        self.failures = FailureReporter(self.folder)
        self.samples = SampleReporter(on=config.log.samples)
        self.interrupted = asyncio.Event()
        self.while_it_runs = contextlib.ExitStack()

    # ---- the run ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train from the first step not yet done to the last; on Ctrl-C, save and raise."""
        config, first = self.config, self.steps_done
        self.folder.forget_steps_from(first)
        log = open_metrics_log(self.folder, config, first_step=first)
        self.collapse_guard.recall(read_metrics(self.folder.metrics_file))
        try:
            with StepProgress("training", total=config.steps, done=first) as progress:
                for step in range(first, config.steps):
                    with noting(f"in step {step}"):
                        values = await self.unless_trainer_lost(self.step(step))
                    # Logged before it is saved: a run killed in between repeats the step, and
                    # drops the line, where the other order would lose it.
                    log.write(step, values)
                    progress.advance(step_line(step, values))
                    if not self.replay:  # it says nothing of the policy that samples
                        self.collapse_guard.check(step, values)
                    if self.interrupted.is_set():
                        raise Interrupted
                    if self.steps_done % config.checkpoint.every == 0:
                        await self.save(wait=False)
            if not self.replay:
                log.write(config.steps, await interruptible(self.interrupted, self.evaluate()))
            await self.save()
            await self.export(self.folder.model)
        except Interrupted:
            if self.config.colocated:  # else its groups would sample on, in the trainer's turn
                await self.close_stream()
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
        if step % config.evaluation.every == 0 and not self.replay:
            with clock("evaluate"):
                evaluation = await interruptible(stop, self.evaluate())
        started = time.perf_counter()

        records = await interruptible(stop, self.rollouts(step, clock))
        discarded = take_discarded_records(self.stream)
        # Before anything that may fail: then they are what one wants to look at.
        await self.save_rollouts(step, records + discarded)
        self.guard.check_rollouts(records)
        self.tool_guard.check_step()
        self.samples.of_step(step, records)
        batch = make_batch(records, keep_zero_advantages=config.trainer.loss.has_kl)
        budget, overlong = config.trainer.tokens_per_microbatch, config.trainer.overlong
        chosen = self.batch_filter(batch.episodes)
        episodes, training = limit_length(chosen, budget, overlong)
        training["episodes_filtered"] = len(batch.episodes) - len(chosen)
        if batch.unattributed:
            training["echo_unattributed"] = batch.unattributed
        self.guard.check_episodes(records, episodes)
        with clock("train"):
            if untrained := limit_length(batch.untrained, budget, overlong)[0]:
                measured = await interruptible(stop, self.measure(untrained))
                training |= {f"untrained/{name}": value for name, value in measured.items()}
            if episodes:
                training |= await self.train(episodes)
        self.steps_done = step + 1
        self.longest_training = max(self.longest_training, clock.seconds["train"])
        with clock("sync"):
            if not self.replay:
                await self.sync.begin(trained=bool(episodes), stream=self.stream)

        seconds = time.perf_counter() - started
        tokens = sum(record.tokens for record in records if record.split != "discarded")
        return {
            **flatten(rollout_metrics(records, self.interactive)),
            **self.count_failures(step, records + discarded),
            **training,
            **self.sync.metrics,
            **self.turns.take_metrics(),
            **evaluation,
            "episodes": len(episodes),
            "policy_version": self.policy_version,
            **{f"time/{phase}": spent for phase, spent in clock.seconds.items()},
            "time/step": seconds,
            "tokens_per_second": tokens / seconds,
        }

    async def unless_trainer_lost(self, work: Awaitable[Result]) -> Result:
        """What `work` returns; HostGoneError as soon as a host of the trainer is lost. What else is
        waited for then, such as a grader on that host, may never come."""
        task = as_task(work)
        try:
            while not (await asyncio.wait({task}, timeout=LOOK_SECONDS))[0]:
                if lost := self.actors.trainer.lost_host:
                    raise HostGoneError(f"the trainer has lost {lost}")
            return task.result()
        finally:
            await cancel(task)

    # ---- the phases of a step -----------------------------------------------------------------

    def prompts(self, first: int, count: int = 1) -> list[PromptGroup]:
        """Prompt groups of the run, a function of their index."""
        return self.groups.train(self.task, first, count)

    async def rollouts(self, step: int, clock: Clock) -> list[RolloutRecord]:
        """The rollouts of a step, annotated; with a stream, they were started ahead of it."""
        if self.replay:
            with clock("read"):
                return await asyncio.to_thread(self.replay.records, step)
        if self.stream:
            with clock("generate"):
                await self.turns.generators()
                if self.config.colocated and self.stream.steps_done < step:
                    self.stream.advance(step)
                groups = await self.stream.batch(step)
            return [record for records in groups for record in records]
        count = self.config.prompts_per_step
        with clock("generate"):
            await self.turns.generators()
            rolled_out = await self.roll_out(self.prompts(step * count, count))
        with clock("grade"):
            scored = await self.grade(rolled_out)
        return [record for group in scored for record in self.annotate(group)]

    def make_stream(self) -> RolloutStream[RolloutLoop, list[RolloutRecord]] | None:
        """The stream of groups that run ahead of their step; None for a synchronous run."""
        config = self.config
        if not config.streams:
            return None

        async def play(loop: RolloutLoop) -> ScoredGroup:
            return (await self.grade(await loop.run()))[0]

        return RolloutStream(
            config.stream,
            start=lambda index: self.loop(self.prompts(index)),
            play=play,
            finish=self.annotate,
            useful=has_signal if config.rollout.max_groups_per_step else None,
            first_step=self.steps_done,
            end_step=config.steps,
        )

    async def close_stream(self) -> None:
        """End the groups that run ahead of their step, if any do."""
        if self.stream:
            with contextlib.suppress(TimeoutError):  # what does not end now, ends with the actors
                await self.stream.close()
            # Why, if that was the end.
            self.count_failures(self.steps_done, take_discarded_records(self.stream))

    async def save_rollouts(self, step: int, records: list[RolloutRecord]) -> None:
        if self.replay:
            await self.rollout_log.copy(self.replay.file(step))
        else:
            await self.rollout_log.write(step, records)

    def count_failures(self, step: int, records: list[RolloutRecord]) -> dict[str, float]:
        """Counts of rollouts and actors lost since the last step; each failure is logged once."""
        lost = failure_metrics(self.failures.of_step(step, records), self.tasks)
        return {**lost, **self.actors.take_deaths()}

    def loop(self, prompts: list[PromptGroup]) -> RolloutLoop:
        return RolloutLoop(
            prompts,
            sample=self.actors.generators.sample,
            respond=self.respond,
            renderer=self.renderer,
            limits=self.config.limits,
        )

    async def roll_out(self, prompts: list[PromptGroup]) -> list[RolloutGroup]:
        """All rollouts of these prompts."""
        return await self.loop(prompts).run()

    async def respond(self, requests: list[EnvironmentRequest]) -> list[EnvironmentResponse]:
        assert self.actors.environments is not None
        responses = await self.actors.environments.respond(requests, step=self.steps_done)
        self.tool_guard.note(requests, responses)
        return responses

    async def grade(self, groups: list[RolloutGroup]) -> list[ScoredGroup]:
        """The groups with the rewards of their rollouts."""
        return await grade(groups, partial(self.actors.graders.rewards, step=self.steps_done))

    def annotate(self, group: ScoredGroup) -> list[RolloutRecord]:
        """The rollouts of a group with what each is to train."""
        share = self.config.rollout.untrained_share
        return annotate(group, self.config.advantage, untrained_share=share)

    async def train(self, episodes: list[Episode]) -> dict[str, float]:
        """Optimizer steps on these episodes: one, unless trainer.updates_per_step says more."""
        parts = split_groups(await self.complete(episodes), self.config.trainer.updates_per_step)
        grids = [self.weighed_grid(part) for part in parts]
        ranks = await self.call_trainer_with("train", "train_step", *grids, step=self.steps_done)
        self.policy_version += 1
        return {**flatten(merge_metrics(ranks)), **grid_metrics(grids)}

    async def measure(self, episodes: list[Episode]) -> dict[str, float]:
        """The metrics that a step on these episodes would have, without taking it."""
        grid = self.weighed_grid(await self.complete(episodes))
        ranks = await self.call_trainer_with("measure", "measure", grid)
        return flatten(merge_metrics(ranks))

    async def complete(self, episodes: list[Episode]) -> list[Episode]:
        """The episodes, checked, with everything the losses need."""
        validate(
            episodes,
            vocab_size=self.vocab_size,
            # Another trainer's count: it may have trained a step that this one leaves out.
            version=None if self.replay else self.policy_version,
            experts=self.experts,
        )
        if self.actors.references:
            episodes = await interruptible(self.interrupted, self.add_ref_logprobs(episodes))
        require(episodes, self.needs)
        return episodes

    async def add_ref_logprobs(self, episodes: list[Episode]) -> list[Episode]:
        """The episodes with the logprobs of their tokens under the frozen reference model."""
        assert self.actors.references is not None
        parallelism = self.config.trainer.reference.parallelism
        grid = self.make_grid(episodes, dp_degree=parallelism.dp_degree)
        ranks = await self.actors.references.logprobs(grid, step=self.steps_done)
        # Ranks that share each layer give the same answer; the first of them is enough.
        rows = grid.read_back(ranks[:: parallelism.tensor_parallel_degree])
        return [
            episode.with_columns(ref_logprobs=row.tolist())
            for episode, row in zip(episodes, rows, strict=True)
        ]

    async def evaluate(self) -> dict[str, float]:
        """Greedy accuracy and reward of the newest weights on the held-out prompts."""
        records = await self.play(self.heldout)
        await self.rollout_log.write(self.steps_done, records, evaluation=True)
        failed = self.failures.of_evaluation(self.steps_done, records)
        self.samples.of_evaluation(self.steps_done, records)
        return {**evaluation_metrics(records), **failed}

    async def play(self, prompts: list[PromptGroup]) -> list[RolloutRecord]:
        """Graded rollouts of evaluation prompts, by the newest weights."""
        await self.sync.done()
        await self.turns.generators()
        groups = await self.grade(await self.roll_out(prompts))
        self.tool_guard.check()
        return [record for group in groups for record in evaluation_records(group)]

    async def save(self, *, wait: bool = True) -> None:
        """Checkpoint what `steps_done` steps have made, unless that is on disk already; with `wait`
        it is, when this returns."""
        if self.folder.latest_checkpoint() != self.steps_done:
            await self.call_trainer(
                "save a checkpoint", lambda trainer: trainer.save.call(self.steps_done, wait=wait)
            )

    async def export(self, folder: Path) -> None:
        """Write the current weights as an HF folder."""
        await self.call_trainer(
            "export the model", lambda trainer: trainer.export_hf.call(str(folder))
        )

    async def call_trainer(self, what: str, call: Callable[[Any], Awaitable[Any]]) -> list[Any]:
        """What each rank of the trainer returns from a call, in rank order, in its turn."""
        await self.turns.trainer()
        return per_rank(await self.call("trainer", what, call(self.actors.trainer.actor)))

    async def call_trainer_with(
        self, what: str, endpoint: str, *grids: Grid, **arguments: Any
    ) -> list[Any]:
        """What each rank of the trainer returns from an endpoint that takes its cells of these
        grids, in rank order, in the trainer's turn."""
        await self.turns.trainer()
        reply = call_ranks(self.actors.trainer.actor, endpoint, *grids, **arguments)
        return await self.call("trainer", what, reply)

    async def call(self, who: str, what: str, reply: Awaitable[Result]) -> Result:
        """Wait for an actor: not for ever, and to be seen in the timeline."""
        wanted, deadline = f"the {who} to {what}", self.config.supervision.deadline_seconds
        if who == "trainer":  # pools watch the other actors
            reply = self.actors.trainer.watched(reply)
        with self.timeline.span(who, what, step=self.steps_done):
            return await call_with_deadline(wanted, reply, deadline_seconds=deadline)

    # ---- the actors ---------------------------------------------------------------------------

    async def __aenter__(self) -> "Controller":
        """Lock the folder, write the config, spawn the actors side by side, and give the generator
        the weights."""
        self.lock.acquire()
        try:
            self.write_config()
            start_monarch(self.folder.log_file("monarch"), self.cluster.hosts)
            await self.actors.check_files()
            for line in self.actors.describe_hosts():
                console.print(line, markup=False)
            with busy("starting the actors"):
                starting = self.call("actors", "start", self.actors.start())
                await interruptible(self.interrupted, starting)
            self.steps_done, *_ = await self.call_trainer(
                "say its step", lambda trainer: trainer.steps_done.call()
            )
            if self.config.resume:
                console.print(f"resuming after {self.steps_done} steps", markup=False)
            elif source := self.config.fork_from:
                console.print(f"forked from {source}: continuing after its steps", markup=False)
            self.policy_version = await self.sync.now()
            self.stream = self.make_stream()
            self.while_it_runs.enter_context(rare_collections())
        except BaseException:
            await self.__aexit__()
            raise
        return self

    def write_config(self) -> None:
        """Write config.json, and before it what a run with that file must have."""
        config = self.config
        copy_fork(config, self.folder)
        for change in self.folder.create(
            config.to_dict(),
            fixed=fixed_settings(config),
            free=free_settings(config),
            model=model_folder(config),
        ):
            console.print(f"changed since the run started: {change}", markup=False)

    async def __aexit__(self, *_error: object) -> None:
        """Stop every process of the run, and unlock its folder if nobody else is to."""
        await self.close_stream()
        await self.sync.close()
        await self.actors.stop()
        self.timeline.close()
        self.while_it_runs.close()
        if self.owns_lock:  # else the run may go on, when a lost host is back
            self.lock.release()
