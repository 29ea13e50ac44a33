"""A starting model by imitation: supervised steps of the same Trainer, on the same actors.

A demonstration is an episode whose assistant tokens echo and nothing trains by RL. Imitation ends
when the accuracy of samples is middling, where reinforcement learning has something to reward and
something left to learn. Greedy accuracy would not tell: it may be far above.
"""

import fcntl
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.config import (
    AdvantageConfig,
    LossConfig,
    LRScheduleConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    WarmStartConfig,
)
from torchtitan_rl.core.plugins import nearest
from torchtitan_rl.core.types import Completion, Episode, Message, Turn
from torchtitan_rl.core.waiting import Interrupted, interruptible
from torchtitan_rl.models.makers.tiny import write_tiny_model
from torchtitan_rl.observability.console import StepProgress, console
from torchtitan_rl.rollout.episodes import to_episodes
from torchtitan_rl.rollout.metrics import evaluation_metrics
from torchtitan_rl.rollout.renderer import ChatRenderer
from torchtitan_rl.rollout.sequences import merge_turns
from torchtitan_rl.run.starting_model import model_folder
from torchtitan_rl.tasks import checked
from torchtitan_rl.tasks.task import Task

if TYPE_CHECKING:
    from torchtitan_rl.hosts.cluster import Cluster
    from torchtitan_rl.run.controller import Controller

StopSignals = Callable[["Controller"], AbstractContextManager[None]]
"""Makes Ctrl-C stop a controller in order."""
MOST_CHECKED = 100
"""Examples among which one of every task is looked for."""
LEAST_ACCURACY = 0.1
"""Below this many groups have no sample to reward."""


async def ensure_starting_model(
    config: RunConfig, stop_signals: StopSignals, cluster: "Cluster | None" = None
) -> None:
    """Make the run's starting model if it has a warm start and the folder is not there yet."""
    if config.warm_start is None or config.model or model_folder(config).exists():
        return
    from torchtitan_rl.run.controller import Controller

    folder = model_folder(config)
    console.print(f"making the starting model {folder.name} (kept for the next runs)")
    with work_folder(folder) as work:
        write_tiny_model(work / "random", seed=config.seed, experts=config.warm_start.experts)
        if config.trainer.backend == "simulated":  # it learns nothing by imitation
            (work / "random").rename(folder)
            return
        controller = Controller(supervised(config, work), cluster=cluster)
        controller.tool_guard.warns_of_model = False  # it is only learning to call tools
        with stop_signals(controller):
            async with controller:
                try:
                    reached = await imitate(controller, config.warm_start)
                except Interrupted:
                    await controller.save()
                    raise
                await controller.export(folder)
    console.print(f"starting model ready: {reached}")


@contextmanager
def work_folder(folder: Path) -> Iterator[Path]:
    """Where the model `folder` is made; kept only by Ctrl-C, so that the next attempt goes on."""
    work = folder.parent / f".{folder.name}-unfinished"
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another run is making the same model: each makes its own
            work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        keep = False
        try:
            yield work
        except Interrupted:
            keep = True
            raise
        finally:
            if not keep:
                shutil.rmtree(work, ignore_errors=True)


def supervised(config: RunConfig, work: Path) -> RunConfig:
    """The run as one of imitation. What it does with samples and advantages has no part in it."""
    warm, sampling, engine = config.warm_start, config.generator.sampling, config.generator.engine
    assert warm is not None
    return replace(
        config,
        model=str(work / "random"),
        task=config.task.without_echo(),
        # What may change between two attempts at one model must not stand in its way.
        rollout=RolloutConfig(thinking=config.rollout.thinking, grader=config.rollout.grader),
        max_offpolicy_steps=0,
        steps=warm.steps,
        prompts_per_step=1,
        generator=replace(
            config.generator,
            sampling=replace(sampling, n=1, logprobs=True),
            engine=replace(engine, return_routed_experts=False),
        ),
        advantage=AdvantageConfig(name="reward"),
        log=replace(config.log, rollouts=False),
        trainer=replace(
            config.trainer,
            export_tokens=False,
            loss=LossConfig(name="reinforce", echo_share=1.0),
            updates_per_step=1,
            router_replay=False,
            # Whole demonstrations, whatever the run does with long episodes.
            tokens_per_microbatch=max(
                config.trainer.tokens_per_microbatch, config.generator.engine.max_model_len
            ),
            optimizer=OptimizerConfig(lr=warm.lr, betas=(0.9, 0.99)),
            lr_scheduler=LRScheduleConfig(warmup_steps=warm.warmup_steps),
        ),
        output_dir=str(work),
        run_name="run",
        resume=(work / "run" / "config.json").exists(),
        fork_from="",
    )


@dataclass(frozen=True, slots=True)
class Reached:
    """Held-out accuracy of a starting model."""

    sampled: float = 0.0
    """Accuracy of samples as the run draws them: where reinforcement learning starts from."""
    greedy: float = 0.0

    def __str__(self) -> str:
        return f"held-out accuracy {self.sampled:.1%} sampled, {self.greedy:.1%} greedy"


async def judge(controller: "Controller") -> Reached:
    """Accuracy of the newest weights on the held-out prompts, in both ways."""
    await controller.sync.now()
    greedy = await controller.evaluate()
    count = controller.config.evaluation.prompts
    prompts = controller.groups.heldout_samples(controller.task, count)
    sampled = evaluation_metrics(await controller.play(prompts))
    return Reached(sampled["eval/accuracy"], greedy["eval/accuracy"])


async def imitate(controller: "Controller", warm: WarmStartConfig) -> Reached:
    """Supervised steps until enough samples are right; returns what was reached."""
    reached, done = Reached(), controller.steps_done
    with StepProgress("imitating demonstrations", total=warm.steps, done=done) as progress:
        for step in range(done, warm.steps):
            first = step * warm.demonstrations_per_step
            indices = range(first, first + warm.demonstrations_per_step)
            await controller.train([e for i in indices for e in demonstration(controller, i)])
            controller.steps_done = step + 1
            line = None
            if (step + 1) % warm.evaluate_every == 0 or step + 1 == warm.steps:
                reached = await interruptible(controller.interrupted, judge(controller))
                line = f"imitation step {step + 1:4d}  │ {reached}"
            progress.advance(line)
            if reached.sampled >= warm.enough_accuracy:
                break
            if controller.interrupted.is_set():
                raise Interrupted
    if reached.sampled < LEAST_ACCURACY:
        console.print(
            f"warning: after {warm.steps} steps of imitation {reached.sampled:.1%} of samples are "
            "right: little for reinforcement learning to reward; raise warm_start.steps",
            markup=False,
        )
    return reached


def demonstration(controller: "Controller", index: int) -> list[Episode]:
    """Demonstration `index` as episodes that nobody sampled: they have no generator logprobs."""
    # Negative indices: the run itself never trains on the same stream of prompts.
    example = checked.train_example(controller.task, -1 - index)
    task = controller.tasks[example.task or controller.task.name]
    rng = random.Random(f"{controller.config.seed}/demonstration/{index}")
    said = checked.demonstration(task, example, rng)
    messages = [{"role": "assistant", "content": said}] if isinstance(said, str) else said
    turns = taught_turns(controller.renderer, example.messages, messages, task.shown_tools)
    # Its own words, not those that a prompt shows: of these, every demonstration has the same.
    taught: list[list[float | None]] = [
        [None] * len(turn.prompt_token_ids) + [1.0] * len(turn.token_ids) for turn in turns
    ]
    return to_episodes(
        merge_turns(turns, taught),
        rl=False,
        policy_version=controller.policy_version,
        reward=0.0,
        advantage=0.0,
        task=task.name,
        group_id=f"demonstration/{index}",
    )


def check_demonstrations(controller: "Controller") -> None:
    """Refuse a task that cannot be imitated, before anything starts."""
    missing = set(controller.tasks)
    for index in range(MOST_CHECKED):
        example = checked.train_example(controller.task, -1 - index)
        name = example.task or controller.task.name
        if name in missing:
            missing.discard(name)
            task = controller.tasks[name]
            try:
                said = checked.demonstration(task, example, random.Random(0))
                _check_calls(task, said)
                demonstration(controller, index)
            except checked.TaskError:
                raise
            except Exception as error:  # of the user's own code
                raise ValueError(f"demonstration of task {name!r}: {error}") from error
        if not missing:
            return


def _check_calls(task: Task, said: str | list[Message]) -> None:
    for message in said if isinstance(said, list) else ():
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if function["name"] not in task.tools:
                known = nearest(function["name"], task.tools)
                raise ValueError(f"it calls the tool {function['name']!r}; {known}")
            task.tools[function["name"]].arguments(function["arguments"])


def taught_turns(
    renderer: ChatRenderer,
    prompt: list[Message],
    messages: list[Message],
    tools: list[dict[str, Any]] | None = None,
) -> list[Turn]:
    """The turns of a conversation as if the model had sampled what the assistant says in it."""
    if not messages or messages[0]["role"] != "assistant":
        raise ValueError("a demonstration must start with an assistant message")
    turns: list[Turn] = []
    shown = renderer.render(prompt, tools=tools)
    said: list[Message] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            said.append(message)
            continue
        if turns and not said:
            raise ValueError("a demonstration has two assistant messages in a row")
        if said:
            shown = renderer.extend(turns[-1], said, tools=tools) or renderer.render(
                prompt + messages[:number], tools=tools
            )
            said = []
        ids = renderer.reply(message)
        # Nobody sampled it: a completion without columns.
        turns.append(shown.then(Completion(0, 0, shown.token_ids, "", ids)))
    return turns
