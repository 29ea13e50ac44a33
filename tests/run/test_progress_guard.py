"""When failures are chance, and when something is broken."""

import math

import pytest

from tests.support import ONE_TURN, a_rollout, episode, scored_group
from torchtitan_rl.config import AdvantageConfig
from torchtitan_rl.rollout.episodes import annotate
from torchtitan_rl.run.progress_guard import MOST_FAILED_ROLLOUTS, ProgressGuard


def records(*statuses, reward=0.0):
    """A group of rollouts that ended like this."""
    rollouts = [
        a_rollout(
            ONE_TURN,
            sample=number,
            status=status,
            failure="it raised KeyError" if status == FAILED else "",
        )
        for number, status in enumerate(statuses)
    ]
    group = scored_group(*rollouts, rewards=[reward] * len(rollouts), name="sums")
    return annotate(group, AdvantageConfig(name="mean_baseline"))


FAILED, FINISHED = "environment_failed", "finished"


def test_some_failures_are_warned_of(capsys):
    ProgressGuard(20).check_rollouts(records(FAILED, FINISHED))
    assert "1 of 2 rollouts of task 'sums' failed: it raised KeyError" in capsys.readouterr().out


def test_one_bad_prompt_is_chance_and_a_task_that_does_nothing_else_is_broken():
    guard = ProgressGuard(20)
    for _ in range(MOST_FAILED_ROLLOUTS // 2 - 1):
        guard.check_rollouts(records(FAILED, FAILED))
    guard.check_rollouts(records(FAILED, FINISHED))
    for _ in range(MOST_FAILED_ROLLOUTS // 2 - 1):
        guard.check_rollouts(records(FAILED, FAILED))
    with pytest.raises(RuntimeError, match="all rollouts of task 'sums' failed: it raised"):
        guard.check_rollouts(records(FAILED, FAILED))


def test_a_large_step_of_failures_is_enough():
    with pytest.raises(RuntimeError, match="all rollouts of task 'sums' failed"):
        ProgressGuard(20).check_rollouts(records(*[FAILED] * MOST_FAILED_ROLLOUTS))


def test_steps_without_an_episode_are_warned_of_then_a_mistake(capsys):
    guard, step = ProgressGuard(2), records(FINISHED, FINISHED)
    guard.check_episodes(step, [])
    assert "nothing to learn from" in capsys.readouterr().out
    guard.check_episodes(step, [episode(advantage=0.0), episode(advantage=-0.5)])
    assert not capsys.readouterr().out
    guard.check_episodes(step, [])
    with pytest.raises(
        RuntimeError, match=r"2 steps in a row.*rewards seen: \[0.0\].*batch_filter"
    ):
        guard.check_episodes(step, [])


def test_episodes_that_a_kl_term_keeps_are_nothing_to_learn_from(capsys):
    guard, step = ProgressGuard(2), records(FINISHED, FINISHED)
    guard.check_episodes(step, [episode(advantage=0.0, echo_alpha=[math.nan] * 5)])
    assert "nothing to learn from" in capsys.readouterr().out
    guard.check_episodes(step, [episode(advantage=0.0, echo_alpha=[math.nan] * 4 + [0.5])])
    assert not capsys.readouterr().out
