"""The grader as an actor: any reward function, and what happens when it misbehaves."""

import pytest
from monarch.actor import ActorError

from tests.low_tokens import LowTokens
from torchtitan_rl.actors.grader import Grader
from torchtitan_rl.actors.interfaces import RewardError, UngradedGroup
from torchtitan_rl.core.types import Completion
from torchtitan_rl.supervision.spawn import spawn_grader
from torchtitan_rl.tasks.answers import AnswerReward
from torchtitan_rl.tasks.jsonl import Jsonl
from torchtitan_rl.tasks.sum_digits import SumDigits


def completion(text: str, token_ids: tuple[int, ...] = (1, 200)) -> Completion:
    return Completion(0, 0, [1], text, list(token_ids))


@pytest.fixture(scope="module")
async def sums():
    spawned = await spawn_grader(Grader.Config(), SumDigits.Config())
    # It has not even imported torch, which would take longer than all the rest of its start.
    assert not [m.path for m in spawned.processes[0].memory_maps() if "libtorch" in m.path]
    yield spawned.actor
    await spawned.stop()


@pytest.fixture(scope="module")
async def low_tokens():
    """Misbehaves in the way that the expected answer says."""
    spawned = await spawn_grader(Grader.Config(timeout_seconds=0.5), LowTokens.Config())
    yield spawned.actor
    await spawned.stop()


async def test_scores_a_group_in_order(sums):
    texts = ["1+2 [ANSWER] 3", "1+2 [ANSWER] 4", "three"]
    scored = await sums.score.call_one([completion(t) for t in texts], 3)
    assert [s.completion.text for s in scored] == texts
    assert [s.reward for s in scored] == pytest.approx([1.1, 0.1, 0.0])
    assert [s.correct for s in scored] == [True, False, False]
    assert scored[0].reward_parts == {"exact": 1.0, "format": 0.1}


async def test_plain_floats_are_rewards_too(low_tokens):
    scored = await low_tokens.score.call_one([completion("a"), completion("b", (1, 2))], None)
    assert [(s.reward, s.correct) for s in scored] == [(0.5, False), (1.0, True)]


async def test_a_file_of_questions_is_graded_without_the_file(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_mine.py").write_text("def one_of(a, b, *, by=1): return (a in b) / by")
    monkeypatch.syspath_prepend(tmp_path)
    reward = AnswerReward(name="rewards_of_mine:one_of", kwargs={"by": 2.0}, marker="Answer:")
    task = Jsonl.Config(path=str(tmp_path / "on_another_machine.jsonl"), reward=reward)
    spawned = await spawn_grader(Grader.Config(), task)
    try:
        texts = ["Hm. Answer: a", "Answer: c", "a"]
        scored = await spawned.actor.score.call_one([completion(t) for t in texts], ["a", "b"])
        assert [s.reward for s in scored] == [0.5, 0.0, 0.0]
        with pytest.raises(
            ActorError, match=r"rewards_of_mine:one_of' raised TypeError.*mine\.py:1"
        ):
            await spawned.actor.score.call_one([completion("Answer: a")], 5)
    finally:
        await spawned.stop()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", "raised KeyError: 'no such answer'"),
        ("short", "returned 1 rewards for 2 completions"),
        ("nan", "returned Reward.*for completion 0; expected a finite number"),
        ("exit", "raised SystemExit: 3"),
        ("hang", "no answer in 0.5 s"),
    ],
)
async def test_a_bad_reward_function_is_an_error_that_names_task_and_group(
    low_tokens, fault, message
):
    with pytest.raises(ActorError, match=message) as caught:
        await low_tokens.score.call_one(
            [completion("a"), completion("b")], fault, group_id="low/train/7"
        )
    assert "task 'low_tokens', group low/train/7" in str(caught.value)


async def test_of_many_groups_each_gets_its_own_rewards_or_its_own_error(low_tokens):
    # 9 is graded on the thread on which 1 and 5 hang, and gets another.
    faults = {1: "hang", 2: "raise", 5: "hang", 6: "short"}
    groups = [
        UngradedGroup([completion("a", (i, 200)), completion("b", (i, 2))], faults.get(i), f"g{i}")
        for i in range(10)
    ]
    results = await low_tokens.rewards.call_one(groups)
    alone = await low_tokens.rewards.call_one(groups[:1])
    assert len(results) == 10
    for number, result in enumerate(results):
        if number in faults:
            assert isinstance(result, RewardError)
            assert f"group g{number}" in str(result)
        else:
            assert result == alone[0]
    assert "low_tokens.py:" in str(results[2])  # where the reward function raised
    assert await low_tokens.rewards.call_one([]) == []


async def test_reward_functions_that_hang_for_ever_do_not_use_up_the_graders_threads(low_tokens):
    hanging = [UngradedGroup([completion("a")], "hang", f"g{i}") for i in range(12)]
    results = await low_tokens.rewards.call_one(hanging)
    assert all("no answer in 0.5 s" in str(result) for result in results)
    assert len(await low_tokens.score.call_one([completion("a")], None)) == 1
