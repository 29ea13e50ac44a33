"""Several tasks in one run: prompts by weight, and each task's own rewards and demonstrations."""

from collections import Counter

import pytest

from tests.low_tokens import LowTokens
from torchtitan_rl.config import EchoConfig, RoleEcho, SamplingConfig
from torchtitan_rl.tasks.mixture import Mixture
from torchtitan_rl.tasks.sum_digits import SumDigits

LOW, SUMS = LowTokens.Config(), SumDigits.Config(max_numbers=2)


def mixture(weights=(3.0, 1.0), **changes):
    config = Mixture.Config(tasks=[LOW, SUMS], weights=list(weights), **changes)
    return config.build(seed=7)


def test_prompts_are_drawn_by_weight_and_know_their_task():
    examples = [mixture().train_example(i) for i in range(2000)]
    drawn = Counter(example.task for example in examples)
    assert drawn["low_tokens"] / 2000 == pytest.approx(0.75, abs=0.03)
    assert set(drawn) == {"low_tokens", "sum_digits"}
    # Without weights all are alike.
    alike = Counter(mixture(weights=()).train_example(i).task for i in range(2000))
    assert alike["low_tokens"] / 2000 == pytest.approx(0.5, abs=0.03)


def test_a_draw_depends_on_seed_and_index_alone():
    first = [mixture().train_example(i) for i in range(50)]
    again = [mixture().train_example(i) for i in reversed(range(50))]
    assert first == again[::-1]
    other = Mixture.Config(tasks=[LOW, SUMS]).build(seed=8)
    assert [e.task for e in first] != [other.train_example(i).task for i in range(50)]


@pytest.mark.parametrize(
    ("count", "weights", "shares"),
    [(8, (3.0, 1.0), (6, 2)), (9, (1.0, 1.0), (4, 5)), (2, (1000.0, 1.0), (2, 1))],
)
def test_heldout_examples_are_shared_out_and_no_task_goes_without(count, weights, shares):
    found = Counter(e.task for e in mixture(weights).heldout_examples(count))
    assert (found["low_tokens"], found["sum_digits"]) == shares


def test_members_answer_for_their_own_examples():
    task = mixture()
    assert list(task.members()) == ["low_tokens", "sum_digits"]
    example = next(e for i in range(50) if (e := task.train_example(i)).task == "sum_digits")
    import random

    assert "[ANSWER]" in task.demonstration(example, random.Random(0))
    with pytest.raises(TypeError, match="ask the task of the example"):
        task.reward([], None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": []}, "at least one task"),
        ({"tasks": [SUMS, SUMS]}, "names of their own"),
        ({"tasks": [Mixture.Config(tasks=[SUMS])]}, "mixture of mixtures"),
        ({"tasks": [SUMS], "weights": [1.0, 2.0]}, "a positive number for each of"),
        ({"tasks": [SUMS], "weights": [0.0]}, "a positive number for each of"),
        ({"tasks": [SUMS], "sampling": SamplingConfig()}, "set them on its tasks"),
        ({"tasks": [SUMS], "echo": EchoConfig(user=RoleEcho())}, "set them on its tasks"),
    ],
)
def test_bad_mixtures_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Mixture.Config(**changes)
