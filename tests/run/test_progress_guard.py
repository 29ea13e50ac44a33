"""When failures are chance, and when something is broken."""

import pytest

from torchtitan_rl.config import RolloutConfig, SamplingConfig
from torchtitan_rl.core.types import Completion, Rollout, ScoredCompletion
from torchtitan_rl.rollout.loop import Conversation, Group
from torchtitan_rl.run.progress_guard import MOST_FAILED_ROLLOUTS, Health
from torchtitan_rl.tasks.sum_digits import SumDigits
from torchtitan_rl.tasks.task import Example


def group(*statuses, reward=0.0):
    task = SumDigits.Config(name="sums").build(seed=0)
    example = Example([{"role": "user", "content": "1"}], 1)
    made = Group("sums/train/0", task, example, SamplingConfig(n=len(statuses)), shown=None)
    for number, status in enumerate(statuses):
        conversation = Conversation(made, number, None, RolloutConfig())
        conversation.rollout = Rollout(
            completions=[Completion(0, 0, [1], "", [2], [-1.0], "stop")],
            messages=[],
            status=status,
            failure="it raised KeyError" if status == "environment_failed" else "",
        )
        made.conversations.append(conversation)
        made.scored.append(ScoredCompletion(conversation.rollout, reward, False))
    return made


FAILED, FINISHED = "environment_failed", "finished"


def test_some_failures_are_warned_of(capsys):
    Health(20).check_rollouts([group(FAILED, FINISHED)])
    assert "1 of 2 rollouts of task 'sums' failed: it raised KeyError" in capsys.readouterr().out


def test_one_bad_prompt_is_chance_and_a_task_that_does_nothing_else_is_broken():
    health = Health(20)
    for _ in range(MOST_FAILED_ROLLOUTS // 2 - 1):
        health.check_rollouts([group(FAILED, FAILED)])
    health.check_rollouts([group(FAILED, FINISHED)])
    for _ in range(MOST_FAILED_ROLLOUTS // 2 - 1):
        health.check_rollouts([group(FAILED, FAILED)])
    with pytest.raises(RuntimeError, match="all rollouts of task 'sums' failed: it raised"):
        health.check_rollouts([group(FAILED, FAILED)])


def test_a_large_step_of_failures_is_enough():
    with pytest.raises(RuntimeError, match="all rollouts of task 'sums' failed"):
        Health(20).check_rollouts([group(*[FAILED] * MOST_FAILED_ROLLOUTS)])


def test_steps_without_an_episode_are_warned_of_then_a_mistake(capsys):
    health, groups = Health(2), [group(FINISHED, FINISHED)]
    health.check_episodes(groups, [])
    assert "nothing to learn from" in capsys.readouterr().out
    health.check_episodes(groups, ["an episode"])
    assert not capsys.readouterr().out
    health.check_episodes(groups, [])
    with pytest.raises(
        RuntimeError, match=r"2 steps in a row.*rewards seen: \[0.0\].*batch_filter"
    ):
        health.check_episodes(groups, [])
