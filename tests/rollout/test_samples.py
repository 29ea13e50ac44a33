"""Samples on the console: when one is shown, and what of it."""

from dataclasses import replace

import pytest

from tests.support import ONE_TURN, a_rollout, scored_group
from torchtitan_rl.config import AdvantageConfig
from torchtitan_rl.core.types import Status
from torchtitan_rl.rollout.episodes import annotate
from torchtitan_rl.rollout.samples import SampleReporter, sample_lines, shortened, split_messages

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": "It is\nseven [or so]."},
]


def records(*rewards, **changes):
    rollouts = [
        a_rollout(ONE_TURN, sample=i, messages=MESSAGES, **changes) for i in range(len(rewards))
    ]
    group = scored_group(*rollouts, rewards=rewards, name="sums")
    made = annotate(group, AdvantageConfig(name="mean_baseline"))
    return [replace(record, expected_answer=7) for record in made]


def test_a_sample_is_all_that_one_must_know_to_judge_its_reward():
    [first, _] = records(0.0, 1.0)
    assert sample_lines(first) == [
        "  prompt    system: Be brief.",
        "            user: What is 3 + 4?",
        "  said      It is",
        "            seven [or so].",
        "  expected  7",
        "  reward    0, wrong, advantage -0.5",
    ]


def test_a_conversation_is_shown_with_its_tools():
    call = {"function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
    talked = [
        *MESSAGES[1:2],
        {"role": "assistant", "content": "A demonstration."},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "7"},
        {"role": "assistant", "content": ""},
    ]
    record = replace(
        records(1.0, 0.0)[0],
        messages=talked,
        turns=2,
        tool_calls=["ok"],
        reward_parts={"exact": 1.0, "format": 0.1},
        status=Status.TURN_LIMIT,
    )
    assert sample_lines(record) == [
        "  prompt    user: What is 3 + 4?",
        "            assistant: A demonstration.",
        "            user: And now?",
        '  said      → add({"a": 3, "b": 4})',
        "            tool add: 7",
        "            (nothing)",
        "  expected  7",
        "  reward    1 (exact 1, format 0.1), correct, advantage 0.5, ended by turn limit, tool "
        "calls: ok",
    ]


def test_a_terminal_does_not_obey_what_a_model_says():
    said = [*MESSAGES[:2], {"role": "assistant", "content": "\x1b[2J\x0c[red]7\tor\r8"}]
    lines = sample_lines(replace(records(0.0, 1.0)[0], messages=said))
    assert lines[2] == "  said      �[2J�[red]7\tor�8"


def test_why_there_is_no_answer_is_said():
    [cut_off, _] = records(0.0, 1.0, status="truncated")
    assert sample_lines(cut_off)[-1].endswith("cut off after 2 tokens")
    lost = replace(cut_off, reward=None, failure="the engine died")
    assert sample_lines(lost)[-1] == "  reward    none: the engine died"


@pytest.mark.parametrize("text", ["x" * 5000, "line\n" * 500, "word " * 2000])
def test_long_texts_are_cut_in_their_middle(text):
    short = shortened(f"start {text} end")
    assert len(short) < 800
    assert short.startswith("start")
    assert short.endswith("end")
    assert "left out]" in short


def test_a_prompt_ends_where_the_models_own_turns_begin():
    assert split_messages(MESSAGES, 1) == (MESSAGES[:2], MESSAGES[2:])
    assert split_messages(MESSAGES, 0) == (MESSAGES, [])  # nothing was sampled


def shown(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line[:1] != " "]


def test_a_sample_is_shown_at_the_first_step_and_when_all_rewards_are_equal(capsys):
    reporter = SampleReporter()
    steps = [records(0, 1), records(0, 1), *[records(0, 0)] * 9, records(1, 0), records(1, 1)]
    for step, made in enumerate(steps):
        reporter.of_step(step, made)
    assert shown(capsys) == [
        "a sample of step 0: sums/train/0",
        *(
            f"all 2 samples of step {step} have the reward 0; one of them: sums/train/0"
            for step in (2, 3, 5, 9)
        ),
        "all 2 samples of step 12 have the reward 1; one of them: sums/train/0",
    ]


def test_and_at_each_evaluation(capsys):
    reporter = SampleReporter()
    for done in (0, 1, 10):
        reporter.of_evaluation(done, [replace(r, split="evaluation") for r in records(1.0)])
    assert shown(capsys) == [
        f"a held-out sample after {steps}, greedy: sums/train/0"
        for steps in ("0 steps", "1 step", "10 steps")
    ]


def test_nothing_is_shown_where_nothing_was_graded_or_wanted(capsys):
    SampleReporter().of_step(0, [])
    SampleReporter(on=False).of_step(0, records(0, 0))
    SampleReporter(on=False).of_evaluation(0, records(0, 0))
    assert not shown(capsys)
