"""Runs with tools and Echo, with a model that was taught to call them: real parts throughout."""

import contextlib
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support import low_tokens, small_engine
from torchtitan_rl.config import (
    AdvantageConfig,
    EchoConfig,
    EvaluationConfig,
    OptimizerConfig,
    RolloutConfig,
    SamplingConfig,
    SupervisionConfig,
    ToolEcho,
    WarmStartConfig,
)
from torchtitan_rl.core.waiting import Clock
from torchtitan_rl.observability.json_lines import read_lines
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.run.starting_model import model_folder
from torchtitan_rl.run.tool_guard import BrokenToolError
from torchtitan_rl.run.warm_start import check_demonstrations, ensure_starting_model
from torchtitan_rl.tasks.calculator import Calculator
from torchtitan_rl.tasks.mixture import Mixture
from torchtitan_rl.tasks.spelling import Spelling
from torchtitan_rl.tasks.tools.tool import tool

ECHO = EchoConfig(tool=ToolEcho())


class Fragile(Spelling):
    """Spelling with a tool that fails while a file is there."""

    @dataclass(kw_only=True, slots=True)
    class Config(Spelling.Config):
        fails_with: str = ""

    config: Config

    @tool
    def spell(self, word: str) -> str:
        """Spell a word of lower-case letters in the radio alphabet."""
        if Path(self.config.fails_with).exists():
            raise ConnectionError("the alphabet is gone")
        return super().spell(word)

    def expected(self, question: str) -> str:
        return Spelling.spell(self, question)


def config_for(folder, *, run="run", **changes):
    base = low_tokens()
    tasks = [
        # Enough to name letters; a task's own temperature, and number of samples.
        Fragile.Config(
            fails_with=str(folder / "broken"),
            echo=ECHO,
            show_tools=False,
            min_letters=1,
            max_letters=2,
            sampling=SamplingConfig(n=2, max_tokens=32, temperature=0.8),
        ),
        Calculator.Config(show_tools=False, min_operations=1, max_operations=1),
    ]
    config = replace(
        base,
        model="",
        warm_start=WarmStartConfig(
            steps=70, enough_accuracy=1.0, evaluate_every=70, cache_dir=str(folder / "models")
        ),
        task=Mixture.Config(tasks=tasks, weights=[2.0, 1.0]),
        prompts_per_step=6,
        trainer=replace(base.trainer, optimizer=OptimizerConfig(lr=2e-4)),
        generator=replace(
            base.generator,
            sampling=SamplingConfig(n=3, max_tokens=32),
            engine=replace(small_engine(), max_model_len=192),
        ),
        # Random rewards are as good as any: something trains in every step.
        advantage=AdvantageConfig(name="reward"),
        rollout=RolloutConfig(max_turns=3, untrained_share=0.3, thinking=True),
        evaluation=EvaluationConfig(every=100, prompts=4),
        supervision=SupervisionConfig(most_failed_tool_calls=4),
        output_dir=str(folder),
        run_name=run,
    )
    return replace(config, **changes)


@contextlib.contextmanager
def no_signals(controller):
    yield


@pytest.fixture(scope="module")
async def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outputs")
    await ensure_starting_model(config_for(folder), no_signals)
    return folder


@pytest.fixture(scope="module")
async def played(folder):
    """Four steps, the conversations of a fifth, twice, and that step with a tool that fails."""
    async with Controller(config_for(folder, run="straight")) as controller:
        rows = [await controller.step(step) for step in range(4)]
        fifths = [await controller.rollouts(4, Clock()) for _ in range(2)]
        (folder / "broken").touch()
        with pytest.raises(BrokenToolError) as broken:
            await controller.step(4)
        (folder / "broken").unlink()
        controller.rollout_log.close()
    return rows, fifths, str(broken.value)


@pytest.fixture(scope="module")
def straight(played):
    return played[0]


def test_a_tool_that_always_fails_ends_the_run_and_gets_the_blame(played):
    said = played[2]
    assert re.match(r"tool 'spell' of task 'spelling' failed in \d+ calls in a row: raised", said)
    assert re.search(r"ConnectionError: the alphabet is gone \(/.*test_tool_runs\.py:\d+\)", said)
    assert re.search(r'called with {"word": ".*"}\. The tool is to blame, and not the model', said)


def records(folder, run, step):
    file = folder / run / "rollouts" / f"step-{step:06d}.jsonl"
    return [record for _, record in read_lines(file)]


async def test_tools_are_called_and_echo_learns_what_they_say(straight):
    for row in straight:
        assert row["tool_calls/ok/all/mean"] > 0.3
        assert row["turns/spelling/mean"] > 1
        assert row["mismatch/all/max"] <= 1e-4
        assert row["echo_tokens"] > 0
        assert row["untrained/echo_nll/mean"] > 0
        assert row["status/finished/all/mean"] > 0
    assert straight[-1]["echo_nll/mean"] < straight[0]["echo_nll/mean"]
    assert straight[-1]["untrained/echo_nll/mean"] < straight[0]["untrained/echo_nll/mean"]


def test_the_same_step_has_the_same_conversations(played):
    """Whatever the tools' timing: so a resumed run continues exactly with tools, too."""
    first, again = ([(r.messages, r.turns, r.sequences) for r in records] for records in played[1])
    assert repr(first) == repr(again)  # NaN is not equal to itself
    assert any(turns > 1 for _, turns, _ in first)


def test_every_rollout_is_saved(folder, straight):
    saved = records(folder, "straight", 0)
    by_task = {name: [r for r in saved if r["task"] == name] for name in ("spelling", "calculator")}
    # Each task has its own number of samples.
    for name, n in (("spelling", 2), ("calculator", 3)):
        groups = {r["group"] for r in by_task[name]}
        assert groups
        assert len(by_task[name]) == n * len(groups)
    talked = next(r for r in by_task["spelling"] if r["tool_calls"] == ["ok"])
    assert [m["role"] for m in talked["messages"]][:3] == ["user", "assistant", "tool"]
    called = talked["messages"][1]["tool_calls"][0]["function"]
    assert called["name"] == "spell"
    assert talked["turns"] >= 2
    assert all(talked["seconds"][phase] > 0 for phase in ("generate", "respond", "grade"))
    assert talked["advantage"] == talked["reward"]
    counted = [r for r in by_task["calculator"] if r["tool_calls"].count("ok")]
    assert counted
    assert all(r["state"] == {"operations": r["tool_calls"].count("ok")} for r in counted)
    heldout = [
        r
        for step in range(4)
        for r in records(folder, "straight", step)
        if r["split"] == "untrained"
    ]
    assert heldout


def test_echo_makes_no_other_starting_model(folder):
    config = config_for(folder)
    quiet = replace(config, task=config.task.without_echo())
    assert model_folder(quiet) == model_folder(config)
    assert [part.echo for part in quiet.task.parts()] == [None, None]


async def test_a_replay_trains_as_the_run_did(folder, straight):
    """Tasks, turns, echo and untrained rollouts: every number of the trainer is the same."""
    config = config_for(folder, run="again", steps=4)
    config = replace(
        config,
        rollout=replace(config.rollout, train_from=str(folder / "straight")),
        trainer=replace(config.trainer, export_tokens=True),
    )
    async with Controller(config) as controller:
        rows = [await controller.step(step) for step in range(4)]
        await controller.save()
        controller.rollout_log.close()
        assert controller.actors.environments is None
    # A replay has no environment, evaluates nothing and syncs no weights.
    skipped = ("time/", "tokens_per_second", "eval/", "sync/", "environment/")
    for row, original in zip(rows, straight, strict=True):
        numbers = {k: v for k, v in original.items() if not k.startswith(skipped)}
        assert {k: row[k] for k in numbers} == numbers
    assert records(folder, "again", 3) == records(folder, "straight", 3)
    exported = list(read_lines(folder / "again" / "tokens" / "step-000003-rank-0.jsonl"))
    trained = {f"{r['group']}/{r['sample']}/0": r for r in records(folder, "again", 3)}
    for _, record in exported:
        [sequence] = trained[record["name"]]["sequences"]
        assert record["tokens"] == sequence["prompt_token_ids"] + sequence["token_ids"]
    assert any(1 in record["echo"] for _, record in exported)


def test_demonstrations_that_are_none_name_their_task(folder, monkeypatch):
    controller = Controller(config_for(folder, run="taught", resume=False))
    check_demonstrations(controller)
    tool = {"role": "tool", "name": "spell", "content": "x"}
    own = {"role": "assistant", "content": "x"}

    def calls(name, **arguments):
        call = {"name": name, "arguments": arguments}
        return [{**own, "tool_calls": [{"function": call}]}, tool, own]

    spelling = controller.tasks["spelling"]
    for messages, said in (
        ([], "must start with an assistant message"),
        ([tool, own], "must start with an assistant message"),
        ([own, own], "two assistant messages in a row"),
        (calls("spel", word="x"), "it calls the tool 'spel'; did you mean 'spell'"),
        (calls("spell", words="x"), "wrong arguments of spell"),
    ):
        monkeypatch.setattr(spelling, "demonstration", lambda *_, said=messages: said)
        with pytest.raises(ValueError, match=f"demonstration of task 'spelling': .*{said}"):
            check_demonstrations(controller)
