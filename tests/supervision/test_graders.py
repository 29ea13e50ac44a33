"""A grader that reward functions kill: only their groups are lost. The processes and their deaths
are real."""

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

import pytest
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from tests.low_tokens import Deadly
from tests.support import low_tokens, small_engine
from torchtitan_rl.actors.grader import Grader
from torchtitan_rl.actors.interfaces import RewardError, UngradedGroup
from torchtitan_rl.config import GeneratorConfig, TrainerConfig
from torchtitan_rl.core.types import Completion
from torchtitan_rl.observability.json_lines import read_lines
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.supervision import pool as module
from torchtitan_rl.supervision.graders import Graders
from torchtitan_rl.supervision.pool import ActorsDiedError
from torchtitan_rl.supervision.spawn import spawn_grader
from torchtitan_rl.tasks.task import Reward


def ungraded(name: str, expected_answer: Any = None) -> UngradedGroup:
    completion = Completion(0, 0, [1], "", [2])
    return UngradedGroup([completion], expected_answer, name, "deadly")


@pytest.fixture
async def graders():
    made = Graders(
        lambda _: spawn_grader(Grader.Config(), Deadly.Config()),
        most_deadly_in_a_row=2,
        exit_report_seconds=60.0,  # however busy the machine is, Monarch reports how it ended
    )
    await made.start()
    yield made
    await made.stop()


def pids(graders):
    return [p.pid for replica in graders.pool.alive for p in replica.spawned.processes]


async def test_the_group_that_kills_is_found_and_the_others_are_graded(graders):
    groups = [ungraded("a"), ungraded("b", "exit"), ungraded("c"), ungraded("d", "crash")]
    before = pids(graders)
    # A call of its own at the same time dies with them, and is none the worse for it.
    given, [beside] = await asyncio.gather(
        graders.rewards(groups), graders.rewards([ungraded("e")])
    )
    good = [Reward(1.0, correct=True)]
    assert [given[0], given[2], beside] == [good, good, good]
    assert isinstance(given[1], RewardError)
    assert str(given[1]) == (
        "reward function of task 'deadly', group b ended the grader's process, which exited with "
        "non-zero code 3"
    )
    assert "group d ended the grader's process, which was killed by signal 11 (SIGSEGV)" in str(
        given[3]
    )
    assert graders.pool.take_deaths() == 3
    assert graders.pool.take_deaths() == 0
    assert len(pids(graders)) <= 1
    assert pids(graders) != before


async def test_a_grader_that_is_killed_from_outside_costs_nothing(graders):
    os.kill(pids(graders)[0], signal.SIGKILL)
    assert await graders.rewards([ungraded("a")]) == [[Reward(1.0, correct=True)]]
    slow = asyncio.create_task(graders.rewards([ungraded("b", "hang")]))
    while not graders.pool.replicas[0].calls:
        await asyncio.sleep(0)
    os.kill(pids(graders)[0], signal.SIGKILL)
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    assert await graders.rewards([ungraded("c")]) == [[Reward(1.0, correct=True)]]


async def test_death_is_noticed_also_if_nobody_says_so(graders, monkeypatch):
    """On a busy machine Monarch may take half a minute to report a death."""
    graders.pool._exit_report_seconds = 0.0
    real = module.call_with_deadline

    async def silent_when_dead(what, call, **how):
        async def reply():
            try:
                return await call
            except SupervisionError:
                await asyncio.Event().wait()

        return await real(what, reply(), **how)

    monkeypatch.setattr(module, "call_with_deadline", silent_when_dead)
    [error] = await graders.rewards([ungraded("a", "exit")])
    assert str(error).endswith("group a ended the grader's process, which has ended")


async def test_deaths_in_a_row_end_it_and_name_the_group(graders):
    deadly = [ungraded(name, "exit") for name in "abcdef"]
    with pytest.raises(ActorsDiedError, match=r"died over 3 groups one after.*group c: .*3"):
        await graders.rewards(deadly)
    with pytest.raises(ActorsDiedError):
        await graders.rewards([ungraded("c")])


async def test_a_grader_that_cannot_start_is_no_groups_fault():
    async def spawn(number):
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        await Graders(spawn).start()


def config_for(folder, tiny_model, **changes):
    base = low_tokens()
    return replace(
        base,
        model=str(tiny_model),
        generator=GeneratorConfig(
            backend="simulated", sampling=base.generator.sampling, engine=small_engine()
        ),
        trainer=TrainerConfig(backend="simulated", threads=1),
        prompts_per_step=4,
        evaluation=replace(base.evaluation, every=100),
        output_dir=str(folder),
        run_name="run",
        **changes,
    )


async def test_a_run_goes_on_without_the_group(tmp_path, tiny_model, capsys):
    """A run whose groups run ahead continues. tests/run/test_async_runs.py shows that a synchronous
    step does too, with rewards that fail: a run treats a reward that kills like these."""
    config = config_for(tmp_path, tiny_model, task=Deadly.Config(), max_offpolicy_steps=1)
    async with Controller(config) as controller:
        rows = [await controller.step(step) for step in range(2)]
    # Of the prompts 0 to 7, 1 and 6 kill. Others take their places.
    assert [row["episodes"] for row in rows] == [16, 16]
    logged = [r for _, r in read_lines(tmp_path / "run" / "logs" / "failures.jsonl")]
    failed = {r["group"] for r in logged if r["kind"] == "failed"}
    assert {"deadly/train/1", "deadly/train/6"} <= failed
    assert all("ended the grader's process" in r["reason"] for r in logged if r["kind"] == "failed")
    assert sum(row["graders/died"] for row in rows) >= 3
    said = capsys.readouterr().out
    assert "the grader died; replacing it" in said
    assert said.count("warning: ") == 1  # the second death is the same reason


async def test_a_run_whose_rewards_all_kill_ends(tmp_path, tiny_model):
    task = Deadly.Config(every=1)
    config = config_for(tmp_path, tiny_model, task=task, max_offpolicy_steps=1)
    async with Controller(config) as controller:
        with pytest.raises(
            RuntimeError, match=r"graders died over 6 groups.*group deadly/train/\S+: its process"
        ):
            await controller.step(0)
