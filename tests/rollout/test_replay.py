"""Rollouts of one run, for the trainer of another: the same episodes, or a clear error."""

import json
from dataclasses import replace

import pytest

from tests.low_tokens import LowTokens
from tests.support import ONE_TURN, TWO_TURNS, a_rollout, low_tokens, scored_group
from torchtitan_rl.config import AdvantageConfig, EchoConfig, LossConfig, RolloutConfig, ToolEcho
from torchtitan_rl.core.metrics import flatten
from torchtitan_rl.core.types import Status
from torchtitan_rl.observability.json_lines import read_lines
from torchtitan_rl.rollout.episodes import annotate, make_batch
from torchtitan_rl.rollout.log import RolloutLog
from torchtitan_rl.rollout.metrics import rollout_metrics
from torchtitan_rl.rollout.record_schema import RENAMED_SINCE_1
from torchtitan_rl.rollout.replay import open_replay
from torchtitan_rl.run.checks import notices

ADVANTAGE = AdvantageConfig(name="mean_baseline")
TASKS = {name: LowTokens.Config(name=name).build() for name in ("low_tokens", "other")}
MODEL = {"vocab_size": 10}


def sampled(turns, sample):
    """A rollout as the loop makes it: every token with the weights that sampled it."""
    rollout = a_rollout(turns, sample=sample)
    return replace(
        rollout,
        turns=[
            replace(t, completion=t.completion.with_columns(token_versions=[3] * len(t.token_ids)))
            for t in rollout.turns
        ],
    )


def a_step():
    """Turns, echo, a group without signal for RL, a discarded one, and some untrained."""
    echo = EchoConfig(tool=ToolEcho(alpha=0.1))
    groups = [
        ([TWO_TURNS, ONE_TURN], [1.0, 0.3], {"echo": echo, "name": "other", "number": 9}),
        ([ONE_TURN, ONE_TURN, ONE_TURN], [0.1, 0.2, 0.7], {"number": 2}),
        ([ONE_TURN, ONE_TURN], [1.0, 1.0], {"number": 1}),
        ([ONE_TURN, ONE_TURN], [0.0, 1.0], {"number": 5}),
    ]
    made = []
    for rollouts, rewards, prompt in groups:
        numbered = [sampled(turns, i) for i, turns in enumerate(rollouts)]
        group = scored_group(*numbered, rewards=rewards, **prompt)
        made.append(annotate(group, ADVANTAGE, untrained_share=0.3))
    made[3] = [record.discarded("took longer than 5 s", Status.TIMED_OUT) for record in made[3]]
    return [record for records in made for record in records]


@pytest.fixture
async def saved(tmp_path):
    """A run of two steps, and what its first was."""
    records = a_step()
    log = RolloutLog(tmp_path / "rollouts")
    for step in range(2):
        await log.write(step, records)
    log.close()
    return tmp_path, records


def replay_of(folder, *, steps=2, tasks=TASKS, model=MODEL, **changes):
    config = replace(
        low_tokens(), rollout=RolloutConfig(train_from=str(folder)), steps=steps, **changes
    )
    return open_replay(config, tasks, model)


def test_the_same_values_are_read_and_the_same_batch_is_made_of_them(saved):
    folder, records = saved
    live = [record for record in records if record.split != "discarded"]
    read = replay_of(folder).records(1)
    assert repr(read) == repr(live)  # NaN is not equal to itself
    batch, again = make_batch(records), make_batch(read)
    assert batch.episodes
    assert batch.untrained
    assert repr(again) == repr(batch)
    for interactive in ((), ("other",)):
        measured = [flatten(rollout_metrics(r, interactive)) for r in (read, records)]
        assert measured[0] == measured[1]


def test_files_of_schema_1_are_read_as_they_were_meant(saved):
    """A sequence had other names for its columns; the untrained share was called held out."""
    folder, records = saved
    now_then = {now: then for then, now in RENAMED_SINCE_1.items()}
    for file in (folder / "rollouts").iterdir():
        old = []
        for _, record in read_lines(file):
            names = [now_then.get(name, name) for one in record["sequences"] for name in one]
            assert not {*names} & {*now_then}
            record["sequences"] = [
                {now_then[name]: one.get(name) for name in now_then} for one in record["sequences"]
            ]
            record["split"] = {"untrained": "held out"}.get(record["split"], record["split"])
            del record["unattributed"]
            old.append({**record, "schema": 1})
        file.write_text("".join(json.dumps(record) + "\n" for record in old))
    assert repr(make_batch(replay_of(folder).records(0))) == repr(make_batch(records))


def test_a_run_that_samples_replays_nothing():
    assert open_replay(low_tokens(), TASKS, MODEL) is None


def test_a_replay_needs_no_generator_and_says_so():
    config = replace(
        low_tokens(), rollout=RolloutConfig(train_from="outputs/run"), max_offpolicy_steps=2
    )
    assert not config.streams
    assert [len(gpus) for gpus in config.gpus] == [1, 0, 0]
    [notice] = notices(config)
    assert "nothing is generated, graded or evaluated" in notice


def change(line, **changes):
    """What is changed in line 2 of the first step's file, or what the line becomes."""

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
        (change(None, schema=3), {}, f"{FIRST} has schema 3; .* reads up to 2"),
        (change(None, task="words"), {}, f"{FIRST} is of task 'words'; this run has low_tokens"),
        (change(None, advantage=None), {}, f"{FIRST}: it was trained, but has no reward, no adv"),
        (
            change(None, sequences=[{"prompt_token_ids": [1], "token_ids": [2], "moods": [3]}]),
            {},
            f"{FIRST}: nobody has declared a column 'moods'",
        ),
        (change(None, status="odd"), {}, f"{FIRST}: 'odd' is not a valid Status"),
        (change(None, sequences=[{}]), {}, f"{FIRST} is no rollout: KeyError"),
        (change(None, reward_parts=3, sequences=7), {}, f"{FIRST} is no rollout: TypeError"),
        (change(None), {"model": {"vocab_size": 9}}, "line 1: token id 9 lies outside 0..8: the m"),
        (
            sequences(token_logprobs=None),
            {"trainer": replace(low_tokens().trainer, loss=LossConfig(name="dppo"))},
            "has no token_logprobs, which trainer.loss.name dppo needs",
        ),
    ],
)
async def test_what_cannot_be_trained_on_is_refused_at_once(saved, edit, settings, said):
    folder, _ = saved
    edit(folder)
    with pytest.raises(ValueError, match=said):
        replay_of(folder, **settings)
