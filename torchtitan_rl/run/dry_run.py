"""`--dry_run`: one prompt of each task, sampled and graded by the real actors, and shown in full.

Nothing is trained, and nothing is left on disk unless it fails.
"""

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torchtitan_rl.config import RunConfig
from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.core.types import Status
from torchtitan_rl.core.waiting import interruptible
from torchtitan_rl.models.makers.tiny import write_tiny_model
from torchtitan_rl.observability.console import busy, console
from torchtitan_rl.rollout.groups import PromptGroup, ScoredGroup
from torchtitan_rl.rollout.metrics import graded
from torchtitan_rl.rollout.record import RolloutRecord
from torchtitan_rl.rollout.samples import sample_lines, show_lines
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.run.starting_model import model_folder
from torchtitan_rl.run.warm_start import MOST_CHECKED, StopSignals
from torchtitan_rl.supervision.spawn import start_monarch

SHOWN = 4
"""Most samples of a prompt that are shown in full."""


class DryRunError(TorchtitanRLError, RuntimeError):
    """The dry run showed something that would not work in a run either."""


async def dry_run(config: RunConfig, stop_signals: StopSignals) -> None:
    """Sample a prompt of each task, grade it, and print all of it; raises if any of it fails."""
    if config.rollout.train_from:
        raise ValueError("--dry_run: with rollout.train_from nothing is sampled or graded")
    folder = Path(tempfile.mkdtemp(prefix="torchtitan-rl-dry-run-"))
    try:
        controller = Controller(_without_traces(config, folder))
        with stop_signals(controller):
            await interruptible(controller.interrupted, _play(controller))
    except Exception as error:
        error.add_note(f"logs: {folder}/run/logs")
        raise
    shutil.rmtree(folder)


def _without_traces(config: RunConfig, folder: Path) -> RunConfig:
    """The run in a folder of its own, with one generator; from a random model, where its own is yet
    to be made by a warm start."""
    model = config.model
    if not model and not model_folder(config).exists():
        assert config.warm_start is not None
        console.print(
            "note: the starting model does not exist yet, and a run makes it in some minutes; this "
            "dry run samples a random model of its shape",
            markup=False,
        )
        experts = config.warm_start.experts
        model = str(write_tiny_model(folder / "model", seed=config.seed, experts=experts))
    return replace(
        config,
        model=model,
        generator=replace(config.generator, replicas=1),
        log=replace(config.log, rollouts=False, timeline=False, wandb_project=""),
        output_dir=str(folder),
        run_name="run",
        resume=False,
        fork_from="",
    )


async def _play(controller: Controller) -> None:
    controller.folder.logs.mkdir(parents=True)
    start_monarch(controller.folder.log_file("monarch"))
    try:
        with busy("starting the generator and the grader"):
            starting = controller.actors.start(training=False)
            await controller.call("actors", "start", starting)
        console.print(f"model     {model_folder(controller.config)}", markup=False)
        failed = []
        for prompt in first_prompts(controller):
            failed += await _show_prompt(controller, prompt)
        failed += controller.tool_guard.failures()
        if failed:
            raise DryRunError("; ".join(dict.fromkeys(failed)))
    finally:
        await controller.__aexit__()


def first_prompts(controller: Controller) -> list[PromptGroup]:
    """The first training prompt of each task."""
    found: dict[str, PromptGroup] = {}
    for index in range(MOST_CHECKED):
        [prompt] = controller.prompts(index)
        found.setdefault(prompt.task.name, prompt)
        if len(found) == len(controller.tasks):
            break
    return list(found.values())


async def _show_prompt(controller: Controller, prompt: PromptGroup) -> list[str]:
    """Sample, grade and show a prompt; returns what failed."""
    ids, sampling = prompt.shown.token_ids, prompt.sampling
    rendered = controller.renderer.tokenizer.decode(ids)
    console.print(f"prompt    {prompt.id}: {len(ids)} tokens, as the model gets them", markup=False)
    show_lines(rendered)
    started = time.perf_counter()
    rolled_out = await controller.roll_out([prompt])
    generated = time.perf_counter()
    [scored] = await controller.grade(rolled_out)
    console.print(
        f"sampled   {sampling.n} times at temperature {sampling.temperature:g}, at most "
        f"{sampling.max_tokens} tokens, in {generated - started:.1f} s; graded in "
        f"{time.perf_counter() - generated:.1f} s",
        markup=False,
    )
    records = controller.annotate(scored)
    for record in records[:SHOWN]:
        console.print(f"sample {record.sample}", markup=False)
        console.print("\n".join(sample_lines(record)), markup=False)
    if len(records) > SHOWN:
        console.print(f"({len(records) - SHOWN} more)", markup=False)
    for hint in hints(records):
        console.print(f"note: {hint}", markup=False)
    return _lost(scored)


def _lost(group: ScoredGroup) -> list[str]:
    return [f"{rollout.group_id}: {rollout.failure}" for rollout in group.lost]


def hints(records: Sequence[RolloutRecord]) -> list[str]:
    """What these samples of a prompt say of the run."""
    samples, found = graded(records), []
    if not samples:
        return []
    rewards = [f"{sample.reward:g}" for sample in samples]
    found.append(f"rewards: {' '.join(rewards)}")
    if len(samples) > 1 and len(set(rewards)) == 1:
        found.append(
            "all rewards are equal, so this prompt would teach nothing. It may be too hard or too "
            "easy. If `said` has the right answer and the reward does not see it, look at the "
            "reward function: for question files, at task.reward.marker, .pattern and .name"
        )
    cut_off = [sample for sample in samples if sample.status == Status.TRUNCATED]
    if len(cut_off) * 2 > len(samples):
        found.append(
            f"{len(cut_off)} of {len(samples)} samples were cut off: raise "
            "generator.sampling.max_tokens, or ask for shorter answers"
        )
    return found
