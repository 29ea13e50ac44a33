"""Every rollout on disk: trained, held out, evaluated or dropped, exactly once and in full."""

import asyncio
import json
import math
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import ONE_TURN, PROMPT, TWO_TURNS, USER, conversation, graded_group
from torchtitan_rl.actors.grader import RewardError
from torchtitan_rl.config import AdvantageConfig, EchoConfig, ToolEcho
from torchtitan_rl.observability.json_lines import encode
from torchtitan_rl.rollout import log as rollout_log
from torchtitan_rl.rollout.episodes import make_batch
from torchtitan_rl.rollout.log import MOST_PENDING, RolloutLog
from torchtitan_rl.rollout.loop import take_rewards
from torchtitan_rl.rollout.record import read_sequence, sequence_record
from torchtitan_rl.rollout.sequences import NOBODY, TokenSequence
from torchtitan_rl.tasks.task import Reward

MEAN = AdvantageConfig(name="mean_baseline")


async def saved(folder, groups, step=7, **options):
    log = RolloutLog(folder)
    await log.write(step, groups, **options)
    log.close()
    [file] = folder.glob("*.jsonl")
    return [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]]


async def test_a_record_says_everything_of_a_rollout(tmp_path):
    echo = EchoConfig(tool=ToolEcho(alpha=0.5))
    group = graded_group(TWO_TURNS, ONE_TURN, rewards=[1.0, 0.0], echo=echo)
    group.example.expected_answer = 24
    group.scored[0].reward_parts = {"exact": 1.0, "form": math.nan}
    group.conversations[0].rollout.completions[1].token_versions = [5]
    group.conversations[0].seconds |= {"generate": 0.5, "grade": 0.25}
    make_batch([group], MEAN)
    first, second = await saved(tmp_path, [group])
    assert first == {
        "schema": 1,
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
                "prompt_ids": [1, 2],
                "ids": [3, 4, 8, 9, 5],
                "logprobs": pytest.approx([-0.3, -0.4, None, None, -0.5]),
                "versions": None,
                "mask": [0, 0, 1, 1, 0, 0, 1],
                "alphas": [None, None, None, None, 0.5, None, None],
                "experts": None,
            }
        ],
    }
    assert (second["advantage"], second["sequences"][0]["mask"]) == (-0.5, None)


async def test_held_out_and_evaluated_rollouts_say_so(tmp_path):
    group = graded_group(ONE_TURN, ONE_TURN, rewards=[1.0, 0.0])
    make_batch([group], MEAN, untrained_share=0.999999)
    assert {r["split"] for r in await saved(tmp_path / "a", [group])} == {"held out"}
    fresh = graded_group(ONE_TURN, rewards=[1.0])
    [record] = await saved(tmp_path / "b", [fresh], split="evaluation")
    assert (record["split"], record["advantage"]) == ("evaluation", None)
    assert record["sequences"][0]["ids"] == [3, 4]
    assert (tmp_path / "b" / "step-000007-evaluation.jsonl").exists()


def failing_sample(group):
    group.conversations[1].failed = ("empty", "nothing was sampled")
    group.bury()
    take_rewards([group], [[Reward(1.0, True)]])


def failing_reward(group):
    with pytest.raises(RewardError):
        take_rewards([group], [RewardError("it raised KeyError")])


@pytest.mark.parametrize(
    ("happens", "expected"),
    [
        (
            failing_sample,
            [("train", "finished", "", 1.0), ("dropped", "empty", "nothing was sampled", None)],
        ),
        (failing_reward, [("dropped", "failed", "it raised KeyError", None)] * 2),
        (
            lambda group: group.give_up("dropped", "not useful"),
            [("dropped", "finished", "not useful", reward) for reward in (1.0, 0.0)],
        ),
        (
            lambda group: group.give_up("timed_out", "took longer than 5 s"),
            [("dropped", "timed_out", "took longer than 5 s", r) for r in (1.0, 0.0)],
        ),
    ],
    ids=["a sample", "the reward", "not useful", "timed out"],
)
async def test_what_is_dropped_says_why(tmp_path, happens, expected):
    group = graded_group(ONE_TURN, ONE_TURN, rewards=[1.0, 0.0])
    group.sampling.n = 2
    if happens in (failing_sample, failing_reward):
        group.scored = []
    happens(group)
    records = await saved(tmp_path, [group])
    assert [(r["split"], r["status"], r["failure"], r["reward"]) for r in records] == expected
    assert [r["sample"] for r in records] == [0, 1]
    assert all(r["sequences"] for r in records)


async def test_rollouts_that_never_began_are_there_too(tmp_path):
    group = graded_group(rewards=[])
    group.sampling.n = 3
    group.conversations = [conversation(group, 1, [(PROMPT, [3])])]
    group.give_up("cancelled", "step 7 had enough groups without it")
    records = await saved(tmp_path, [group])
    assert sorted(r["sample"] for r in records) == [0, 1, 2]
    assert {r["status"] for r in records} == {"cancelled"}
    assert [len(r["sequences"]) for r in records] == [1, 0, 0]
    assert records[1]["policy_version"] is records[1]["newest_version"] is None


streams = st.integers(2, 6).flatmap(
    lambda n: st.fixed_dictionaries(
        {
            "ids": st.lists(st.integers(0, 300), min_size=n, max_size=n),
            "sampled": st.lists(st.booleans(), min_size=n, max_size=n),
            "logprobs": st.lists(st.floats(-20, 0), min_size=n, max_size=n),
            "versions": st.lists(st.integers(0, 9), min_size=n, max_size=n),
            "alphas": st.lists(st.none() | st.floats(-1, 1), min_size=n, max_size=n),
            "experts": st.none() | st.just(np.arange(4 * n, dtype=np.int16).reshape(n, 2, 2)),
        }
    )
)


@given(streams)
def test_a_sequence_is_read_as_it_was_written(drawn):
    sampled = drawn["sampled"]
    sample = TokenSequence(
        ids=drawn["ids"],
        sampled=sampled,
        logprobs=[p if s else math.nan for p, s in zip(drawn["logprobs"], sampled, strict=True)],
        versions=[v if s else NOBODY for v, s in zip(drawn["versions"], sampled, strict=True)],
        alphas=drawn["alphas"],
        routed_experts=drawn["experts"],
    )
    again = read_sequence(json.loads(encode(sequence_record(sample))), np.dtype(np.int16))
    for name in ("ids", "sampled", "versions", "alphas"):
        assert getattr(again, name) == getattr(sample, name)
    assert np.array_equal(again.logprobs, sample.logprobs, equal_nan=True)
    assert (again.routed_experts is None) == (sample.routed_experts is None)
    if sample.routed_experts is not None:
        assert again.routed_experts.dtype == np.int16
        assert np.array_equal(again.routed_experts, sample.routed_experts)


async def test_a_step_that_is_done_again_replaces_its_file(tmp_path):
    once, twice = (graded_group(ONE_TURN, rewards=[r]) for r in (0.25, 0.75))
    await saved(tmp_path, [once])
    assert [r["reward"] for r in await saved(tmp_path, [twice])] == [0.75]


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
    group = graded_group([(PROMPT, [3]), ([*PROMPT, (9, USER)], [5])], rewards=[1.0])
    group.task.state_columns = ("operations",)
    group.conversations[0].rollout.state = {"operations": value, "other": 1}
    [record] = await saved(tmp_path, [group])
    assert record["state"].keys() == {"operations"}
