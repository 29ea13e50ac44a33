"""Rollouts of one run, for the trainer of another: the same episodes, or a clear error."""

import json
from dataclasses import replace

import pytest

from tests.low_tokens import LowTokens
from tests.support import ONE_TURN, TWO_TURNS, graded_group, low_tokens
from torchtitan_rl.config import AdvantageConfig, EchoConfig, LossConfig, RolloutConfig, ToolEcho
from torchtitan_rl.core.metrics import flatten
from torchtitan_rl.observability.json_lines import read_lines
from torchtitan_rl.rollout.episodes import make_batch
from torchtitan_rl.rollout.log import RolloutLog
from torchtitan_rl.rollout.loop import all_scored
from torchtitan_rl.rollout.metrics import rollout_metrics
from torchtitan_rl.rollout.replay import open_dump
from torchtitan_rl.run.checks import notices

ADVANTAGE = AdvantageConfig(name="mean_baseline")
TASKS = {name: LowTokens.Config(name=name).build() for name in ("low_tokens", "other")}
MODEL = {"vocab_size": 10}


def a_step():
    """Turns, echo, a group that teaches nothing by RL, a dropped one, and some held out."""
    echo = EchoConfig(tool=ToolEcho(alpha=0.1))
    groups = [
        graded_group(TWO_TURNS, ONE_TURN, rewards=[1.0, 0.3], echo=echo, name="other", number=9),
        graded_group(ONE_TURN, ONE_TURN, ONE_TURN, rewards=[0.1, 0.2, 0.7], number=2),
        graded_group(ONE_TURN, ONE_TURN, rewards=[1.0, 1.0], number=1),
        graded_group(ONE_TURN, ONE_TURN, rewards=[0.0, 1.0], number=5),
    ]
    for group in groups:
        for conversation in group.conversations:
            for turn in conversation.turns:
                turn.token_versions = [3] * len(turn.token_ids)
    groups[3].give_up("timed_out", "took longer than 5 s")
    return groups


@pytest.fixture
async def dumped(tmp_path):
    """A run of two steps, and what its first was."""
    groups = a_step()
    batch = make_batch(groups[:3], ADVANTAGE, untrained_share=0.3)
    log = RolloutLog(tmp_path / "rollouts")
    for step in range(2):
        await log.write(step, groups)
    log.close()
    return tmp_path, groups, batch


def dump_of(folder, *, steps=2, tasks=TASKS, model=MODEL, **changes):
    config = replace(
        low_tokens(), rollout=RolloutConfig(train_from=str(folder)), steps=steps, **changes
    )
    return open_dump(config, tasks, None, model)


def test_the_same_batch_is_made_of_it(dumped):
    folder, groups, batch = dumped
    assert batch.episodes
    assert batch.heldout
    read = dump_of(folder).groups(1)
    # Neither the advantage nor the share that is held out is asked for again.
    again = make_batch(read, AdvantageConfig(name="reward"), untrained_share=0.0)
    assert repr(again.episodes) == repr(batch.episodes)  # NaN is not equal to itself
    assert repr(again.heldout) == repr(batch.heldout)
    for interactive in ((), ("other",)):
        measured = [
            flatten(rollout_metrics(all_scored(g), interactive)) for g in (read, groups[:3])
        ]
        assert measured[0] == measured[1]


def test_a_run_that_samples_has_no_dump():
    assert open_dump(low_tokens(), TASKS, None, MODEL) is None


def test_dumps_need_no_generator_and_say_so():
    config = replace(
        low_tokens(), rollout=RolloutConfig(train_from="outputs/run"), max_offpolicy_steps=2
    )
    assert not config.streams
    assert [len(gpus) for gpus in config.gpus] == [1, 0, 0]
    [notice] = notices(config)
    assert "nothing is generated, graded or evaluated" in notice


def change(line, **changes):
    """Of line 2 of the first step, or what it becomes."""

    def edit(folder):
        file = folder / "rollouts" / "step-000000.jsonl"
        lines = file.read_text().split("\n")[:-1]
        record = json.loads(lines[1])
        lines[1] = json.dumps(record | changes) if line is None else line
        file.write_text("\n".join(lines) + "\n")

    return edit


def sequences(**changes):
    def edit(folder):
        file = folder / "rollouts" / "step-000000.jsonl"
        records = [record for _, record in read_lines(file)]
        for record in records:
            for sequence in record["sequences"]:
                sequence |= changes
        file.write_text("".join(json.dumps(record) + "\n" for record in records))

    return edit


def cut_off(folder):
    file = folder / "rollouts" / "step-000001.jsonl"
    file.write_bytes(file.read_bytes()[:-10])


def remove(pattern):
    def edit(folder):
        for file in folder.glob(pattern):
            file.unlink()

    return edit


FIRST = "step-000000.jsonl, line 2"


@pytest.mark.parametrize(
    ("edit", "settings", "said"),
    [
        (remove("rollouts/*"), {}, r"no rollouts of a run in .*rollouts: give the folder of a run"),
        (remove("rollouts/step-000001*"), {}, r"step-000001.jsonl is missing: set steps to 1"),
        (cut_off, {}, r"step-000001.jsonl, line 9 is broken: the file was cut off"),
        (change('{"schema": 1, '), {}, f"{FIRST} is broken"),
        (change('{"step": 0}'), {}, f"{FIRST} has no schema: it is of a run too old"),
        (change(None, schema=2), {}, f"{FIRST} has schema 2; .* reads up to 1"),
        (change(None, task="words"), {}, f"{FIRST} is of task 'words'; this run has low_tokens"),
        (change(None, advantage=None), {}, f"{FIRST}: it was trained, but has no reward, no adv"),
        (change(None, sequences=[{}]), {}, f"{FIRST} is no rollout: KeyError"),
        (change(None, reward_parts=3, sequences=7), {}, f"{FIRST} is no rollout: TypeError"),
        (change(None), {"model": {"vocab_size": 9}}, "line 1: token id 9 lies outside 0..8: the m"),
        (
            sequences(logprobs=None),
            {"trainer": replace(low_tokens().trainer, loss=LossConfig(name="dppo"))},
            "has no generator_logprobs, which trainer.loss.name dppo needs",
        ),
    ],
)
async def test_what_cannot_be_trained_on_is_refused_at_once(dumped, edit, settings, said):
    folder, _, _ = dumped
    edit(folder)
    with pytest.raises(ValueError, match=said):
        dump_of(folder, **settings)
