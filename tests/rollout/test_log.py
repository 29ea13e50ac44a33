"""Every rollout on disk: trained, untrained, evaluated or discarded, exactly once and in full."""

import asyncio
import json
import math
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import ONE_TURN, PROMPT, TWO_TURNS, USER, a_rollout, scored_group
from torchtitan_rl.actors.interfaces import RewardError
from torchtitan_rl.config import AdvantageConfig, EchoConfig, ToolEcho
from torchtitan_rl.core.types import Status
from torchtitan_rl.observability.json_lines import encode
from torchtitan_rl.rollout import log as rollout_log
from torchtitan_rl.rollout.discards import discarded_records
from torchtitan_rl.rollout.episodes import annotate
from torchtitan_rl.rollout.grading import grade
from torchtitan_rl.rollout.groups import RolloutGroup
from torchtitan_rl.rollout.log import MOST_PENDING, RolloutLog
from torchtitan_rl.rollout.loop import RolloutLoop
from torchtitan_rl.rollout.record import (
    evaluation_records,
    sequence_from_json,
    sequence_to_json,
)
from torchtitan_rl.rollout.sequences import TokenSequence
from torchtitan_rl.rollout.stream_plan import Discarded
from torchtitan_rl.tasks.task import Reward

MEAN = AdvantageConfig(name="mean_baseline")


async def saved(folder, records, step=7, **options):
    log = RolloutLog(folder)
    await log.write(step, records, **options)
    log.close()
    [file] = folder.glob("*.jsonl")
    return [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]]


async def test_a_record_says_everything_of_a_rollout(tmp_path):
    echo = EchoConfig(tool=ToolEcho(alpha=0.5))
    talked = a_rollout(TWO_TURNS, seconds={"generate": 0.5, "respond": 0.0, "grade": 0.25})
    newer = talked.turns[1].completion.with_columns(token_versions=[5])
    talked = replace(talked, turns=[talked.turns[0], replace(talked.turns[1], completion=newer)])
    group = scored_group(talked, a_rollout(ONE_TURN, sample=1), rewards=[1.0, 0.0], echo=echo)
    group.prompt.example.expected_answer = 24
    parts = {"exact": 1.0, "form": math.nan}
    group = replace(group, scored=(replace(group.scored[0], reward_parts=parts), group.scored[1]))
    first, second = await saved(tmp_path, annotate(group, MEAN))
    assert first == {
        "schema": 2,
        "step": 7,
        "split": "train",
        "task": "low_tokens",
        "group": "low_tokens/train/0",
        "sample": 0,
        "reward": 1.0,
        "correct": True,
        "reward_parts": {"exact": 1.0, "form": None},
        "advantage": 0.5,
        "status": "finished",
        "failure": "",
        "turns": 2,
        "tokens": 3,
        "tool_calls": [],
        "policy_version": 3,
        "newest_version": 5,
        "temperature": 0.7,
        "seconds": {"generate": 0.5, "respond": 0.0, "grade": 0.25},
        "messages": [],
        "expected_answer": 24,
        "state": {},
        "sequences": [
            {
                "prompt_token_ids": [1, 2],
                "token_ids": [3, 4, 8, 9, 5],
                "loss_mask": [0, 0, 1, 1, 0, 0, 1],
                "token_logprobs": pytest.approx([-0.3, -0.4, None, None, -0.5]),
                "token_versions": [-1, -1, -1, -1, 5],
                "echo_alpha": [None, None, None, None, 0.5, None, None],
            }
        ],
        "unattributed": 0,
    }
    # A column that says nothing is left out.
    assert second["advantage"] == -0.5
    assert second["sequences"][0].keys() == {"prompt_token_ids", "token_ids", "token_logprobs"}


async def test_untrained_and_evaluated_rollouts_say_so(tmp_path):
    group = scored_group(ONE_TURN, ONE_TURN, rewards=[1.0, 0.0])
    records = await saved(tmp_path / "a", annotate(group, MEAN, untrained_share=0.999999))
    assert {record["split"] for record in records} == {"untrained"}
    greedy = evaluation_records(scored_group(ONE_TURN, rewards=[1.0]))
    [record] = await saved(tmp_path / "b", greedy, evaluation=True)
    assert (record["split"], record["advantage"]) == ("evaluation", None)
    assert record["sequences"][0]["token_ids"] == [3, 4]
    assert (tmp_path / "b" / "step-000007-evaluation.jsonl").exists()


def rolled_out(*rollouts, **prompt):
    group = scored_group(*rollouts, rewards=[0.0] * len(rollouts), **prompt)
    return RolloutGroup(group.prompt, tuple(scored.completion for scored in group.scored))


async def test_a_sample_and_a_reward_that_failed_say_why(tmp_path):
    """A sample of the first group and the rewards of the second are lost, and nothing else."""
    empty = a_rollout(ONE_TURN, sample=1).failed(Status.EMPTY, "nothing was sampled")
    groups = [rolled_out(ONE_TURN, empty), rolled_out(ONE_TURN, ONE_TURN, number=1)]

    async def rewards(ungraded):
        assert [len(group.completions) for group in ungraded] == [1, 2]
        # The attributions of tokens stay here: they would be most of the message.
        assert ungraded[0].completions[0].turns[0].attributions is None
        return [[Reward(1.0, True)], RewardError("it raised KeyError")]

    graded = await grade(groups, rewards)
    records = [record for group in graded for record in annotate(group, MEAN)]
    lost = await saved(tmp_path, records)
    assert [(r["split"], r["status"], r["failure"], r["reward"]) for r in lost] == [
        ("train", "finished", "", 1.0),
        ("discarded", "empty", "nothing was sampled", None),
        ("discarded", "failed", "it raised KeyError", None),
        ("discarded", "failed", "it raised KeyError", None),
    ]
    assert [r["sample"] for r in lost] == [0, 1, 0, 1]
    assert all(r["sequences"] for r in lost)
    assert graded[0].scored[0].completion.seconds["grade"] >= 0


async def test_rewards_that_all_fail_are_no_accident():
    async def rewards(ungraded):
        return [RewardError(f"no answer for {len(ungraded)}")]

    with pytest.raises(RewardError, match="no answer for 1"):
        await grade([rolled_out(ONE_TURN)], rewards)
    failed = [rolled_out(a_rollout(ONE_TURN).failed(Status.FAILED, "a bad prompt"))]
    with pytest.raises(RuntimeError, match="a bad prompt"):
        await grade(failed, rewards)


@pytest.mark.parametrize(
    ("kind", "finished", "status", "rewards"),
    [
        ("not_useful", True, "finished", [1.0, 0.0]),
        ("cancelled", True, "cancelled", [1.0, 0.0]),
        ("cancelled", False, "cancelled", [None, None]),
        ("timed_out", False, "timed_out", [None, None]),
    ],
)
async def test_a_discarded_group_says_why(tmp_path, kind, finished, status, rewards):
    """Every rollout is there: with its reward, if its group had finished, else as far as it got."""
    group = scored_group(ONE_TURN, ONE_TURN, rewards=[1.0, 0.0])
    loop = RolloutLoop([group.prompt], sample=None, respond=None, renderer=None, limits=None)
    result = annotate(group, MEAN) if finished else None
    records = discarded_records(Discarded(loop, 3, 7, kind, "the reason", result))
    records = await saved(tmp_path, records)
    assert [(r["split"], r["status"], r["failure"]) for r in records] == [
        ("discarded", status, "the reason")
    ] * 2
    assert [r["reward"] for r in records] == rewards
    assert [r["sample"] for r in records] == [0, 1]
    assert [r["advantage"] for r in records] == [None, None]
    assert [len(r["sequences"]) for r in records] == [int(finished)] * 2
    assert finished or records[1]["policy_version"] is records[1]["newest_version"] is None


streams = st.integers(2, 6).flatmap(
    lambda n: st.fixed_dictionaries(
        {
            "ids": st.lists(st.integers(0, 300), min_size=n, max_size=n),
            "sampled": st.lists(st.booleans(), min_size=n, max_size=n),
            "logprobs": st.lists(st.floats(-20, 0), min_size=n, max_size=n),
            "versions": st.lists(st.integers(0, 9), min_size=n, max_size=n),
            "alphas": st.none()
            | st.lists(st.just(math.nan) | st.floats(-1, 1), min_size=n, max_size=n),
            "prompt": st.integers(0, n - 1),
            "experts": st.none() | st.just(np.arange(4 * n, dtype=np.int16).reshape(n, 2, 2)),
        }
    )
)


@given(streams)
def test_a_sequence_is_read_as_it_was_written(drawn):
    prompt = drawn["prompt"]
    whole = {"loss_mask": drawn["sampled"], "echo_alpha": drawn["alphas"]}
    columns = {
        **{name: values for name, values in whole.items() if values is not None},
        "token_logprobs": drawn["logprobs"][prompt:],
        "token_versions": drawn["versions"][prompt:],
    }
    if drawn["experts"] is not None:
        columns["routed_experts"] = drawn["experts"]
    ids = drawn["ids"]
    sequence = TokenSequence(ids[:prompt], ids[prompt:], columns)
    again = sequence_from_json(json.loads(encode(sequence_to_json(sequence))))
    assert (again.prompt_token_ids, again.token_ids) == (ids[:prompt], ids[prompt:])
    assert again.columns.keys() == columns.keys()
    for name, values in columns.items():
        np.testing.assert_array_equal(again.columns[name], values)
        assert type(again.columns[name]) is type(values)
    if drawn["experts"] is not None:
        assert again.routed_experts.dtype == np.int16


async def test_a_step_that_is_done_again_replaces_its_file(tmp_path):
    once, twice = (annotate(scored_group(ONE_TURN, rewards=[r]), MEAN) for r in (0.25, 0.75))
    await saved(tmp_path, once)
    assert [r["reward"] for r in await saved(tmp_path, twice)] == [0.75]


async def test_a_log_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "rollouts").write_text("in the way")
    log = RolloutLog(tmp_path / "rollouts")
    await log.write(0, [])
    log._thread.shutdown()  # that is over
    with pytest.raises(OSError, match="rollouts"):
        await log.write(1, [])
    late = RolloutLog(tmp_path / "rollouts")
    await late.write(2, [])
    with pytest.raises(OSError, match="rollouts"):
        late.close()


async def test_a_slow_disk_holds_up_the_step_and_not_the_loop(tmp_path, monkeypatch):
    """So many files wait, and no more: what is pending is bounded."""
    fast = threading.Event()
    monkeypatch.setattr(rollout_log, "_write", lambda *_: fast.wait(60))
    log = RolloutLog(tmp_path)
    for step in range(MOST_PENDING):
        await log.write(step, [])
    late = asyncio.ensure_future(log.write(MOST_PENDING, []))
    await asyncio.sleep(0.01)
    assert not late.done()
    fast.set()
    await late
    log.close()


@pytest.mark.parametrize(
    "value", [{(1, 2): 3}, {1}, 10**5000, "a\ud800"], ids=["keys", "set", "huge", "surrogate"]
)
async def test_whatever_a_state_holds_is_saved(tmp_path, value):
    turns = [(PROMPT, [3]), ([*PROMPT, (9, USER)], [5])]
    state = {"operations": value, "other": 1}
    group = scored_group(a_rollout(turns, state=state), rewards=[1.0])
    group.prompt.task.state_columns = ("operations",)
    [record] = await saved(tmp_path, annotate(group, MEAN))
    assert record["state"].keys() == {"operations"}
