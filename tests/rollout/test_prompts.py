"""Prompts of a file that are too long for a rollout are found, and named, before the run."""

import json
from dataclasses import replace

import pytest

from tests.support import low_tokens
from torchtitan_rl.config import SamplingConfig
from torchtitan_rl.rollout.prompts import PromptGroups
from torchtitan_rl.rollout.renderer import ChatRenderer
from torchtitan_rl.tasks.jsonl import Jsonl


@pytest.fixture(scope="module")
def renderer(tiny_model):
    return ChatRenderer(tiny_model)


@pytest.fixture
def groups(renderer, tmp_path):
    """Prompt groups of a file with these questions; 116 of 128 tokens are left for a prompt."""

    def make(questions, **settings):
        lines = [{"question": question, "answer": 1} for question in questions]
        path, heldout = tmp_path / "long.jsonl", tmp_path / "heldout.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        heldout.write_text(json.dumps({"question": "held out", "answer": 1}))
        task = Jsonl.Config(path=str(path), heldout_path=str(heldout), **settings)
        config = replace(low_tokens(), task=task)
        return PromptGroups(config, {"jsonl": task.build(seed=0)}, renderer)

    return make


def letters(*counts):
    return ["x" * count for count in counts]


def around(renderer):
    """Tokens of a prompt beside those of its question."""
    return len(renderer.prompt([{"role": "user", "content": ""}]))


def test_prompts_that_just_fit_are_taken_and_the_next_longer_is_not(groups, renderer):
    most = 128 - 12 - around(renderer)
    groups(letters(*range(1, most + 1)))
    with pytest.raises(ValueError, match=r"1 prompts of more than 116 tokens.*\n  .*line 1: 117 t"):
        groups(letters(most + 1, 5))


def test_those_that_are_too_long_are_named_by_their_lines(groups):
    with pytest.raises(ValueError, match="task 'jsonl' has 14 prompts") as error:
        groups(letters(5, *range(200, 214), 6))
    _, *lines, last = str(error.value).splitlines()
    numbers = [line.partition(":")[0].split()[-1] for line in lines]
    assert numbers == [str(n) for n in range(2, 12)]
    assert last == "  and 4 more"
    assert "generator.engine.max_model_len" in str(error.value)


def test_what_is_sampled_and_the_instructions_count(groups, renderer):
    with pytest.raises(ValueError, match="15 prompts of more than 28 tokens: beside 100 to sample"):
        groups(letters(*range(50, 64)), sampling=SamplingConfig(n=4, max_tokens=100))
    most = 128 - 12 - around(renderer)
    with pytest.raises(ValueError, match=r"1 prompts of .* \d+ tokens are the instructions \("):
        groups(letters(most), instructions="xx")


def test_instructions_that_leave_no_room_are_to_blame_and_not_the_lines(groups):
    with pytest.raises(ValueError, match=r"^task 'jsonl': the instructions \(system") as error:
        groups(["?", "!"], instructions="x" * 120)
    assert "has room for 116. Shorten them" in str(error.value)
    assert "line" not in str(error.value)


def test_many_bytes_may_be_few_tokens(groups, renderer):
    word = "calculator"  # one token of the tiny model
    assert renderer.count(word * 30) == 30
    groups([word * 30])
    with pytest.raises(ValueError, match="1 prompts of more than 116"):
        groups([word * 116])


def test_a_task_without_anything_to_evaluate_on_is_refused(renderer, monkeypatch):
    config = low_tokens()
    task = config.task.build(seed=0)
    made = PromptGroups(config, {"low_tokens": task}, renderer)
    assert [group.sampling.n for group in made.heldout(task, 3)] == [1, 1, 1]
    monkeypatch.setattr(type(task), "heldout_examples", lambda self, count: [])
    said = r"heldout_examples\(3\) of task 'low_tokens' returned no example.*_prompts\.py:"
    with pytest.raises(ValueError, match=said):
        made.heldout(task, 3)
