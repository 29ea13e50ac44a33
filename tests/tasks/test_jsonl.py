"""Questions of a file: splits that never meet, an order for every epoch, errors before the run."""

import json
import os
import re
import time
from pathlib import Path

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.cli.train import parse
from torchtitan_rl.core.types import Completion, Rollout
from torchtitan_rl.run.launch import check
from torchtitan_rl.tasks.answers import AnswerReward
from torchtitan_rl.tasks.jsonl import Jsonl, shuffled
from torchtitan_rl.tasks.mixture import Mixture
from torchtitan_rl.tasks.task import is_heldout

ROOT = Path(__file__).parents[2]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def sums(numbers):
    return [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in numbers]


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "sums.jsonl", sums(range(200)))


def task(path, seed=0, **settings):
    return Jsonl.Config(path=str(path), **settings).build(seed=seed)


def asked(example):
    return example.messages[-1]["content"]


def rollout(text):
    return Rollout([Completion(0, 0, [1], text, [2])], [], "finished", {})


def test_an_epoch_asks_every_question_that_is_not_held_out_once(file):
    jsonl = task(file)
    heldout = {f"{n} + {n}?" for n in range(200) if is_heldout(f"{n} + {n}?", 0.1)}
    count = 200 - len(heldout)
    for epoch in (-1, 0, 1, 7):
        questions = [asked(jsonl.train_example(epoch * count + i)) for i in range(count)]
        assert len(set(questions)) == count
        assert not heldout & set(questions)
    assert {asked(e) for e in jsonl.heldout_examples(len(heldout))} == heldout


def test_the_order_is_a_function_of_seed_and_epoch(file):
    def order(seed, epoch):
        jsonl = task(file, seed=seed)
        jsonl.train_example(3)
        return [asked(jsonl.train_example(epoch * 100 + i)) for i in range(50)]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (-2, 0, 2)}) == 6


@given(st.integers(1, 300), st.text())
def test_an_order_has_every_number_once(count, key):
    assert sorted(shuffled(count, key)) == list(range(count))


def test_an_example_is_the_line_behind_the_instructions(tmp_path):
    line = {"prompt": "Add 2 and 3.", "target": 5}
    path = write(tmp_path / "one.jsonl", [line, *({"prompt": f"{n}", "target": n} for n in "abc")])
    heldout = write(tmp_path / "two.jsonl", [{"prompt": "Add 4 and 3.", "target": 7}])
    settings = {"question_field": "prompt", "answer_field": "target", "heldout_path": heldout}
    jsonl = task(path, instructions="Be brief.", **settings)
    [example] = jsonl.heldout_examples(1)
    assert example.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add 4 and 3."},
    ]
    assert example.expected_answer == 7
    assert [m["role"] for m in task(path, **settings).train_example(0).messages] == ["user"]


def test_heldout_questions_are_the_same_for_every_seed_order_and_count(file, tmp_path):
    backwards = write(tmp_path / "backwards.jsonl", reversed(sums(range(200))))
    examples = task(file).heldout_examples(12)
    assert task(backwards, seed=5).heldout_examples(12) == examples
    assert task(file).heldout_examples(5) == examples[:5]


def test_a_question_that_stands_there_twice_is_on_one_side_only(tmp_path):
    path = write(tmp_path / "twice.jsonl", sums([*range(60)] * 3))
    jsonl = task(path, heldout_share=0.3)
    count = len([*jsonl._heldout])
    heldout = {asked(example) for example in jsonl.heldout_examples(count)}
    assert len(heldout) == count
    train = {asked(jsonl.train_example(index)) for index in range(180 - 3 * count)}
    assert heldout | train == {f"{n} + {n}?" for n in range(60)}
    assert not heldout & train


def test_questions_of_a_heldout_file_are_not_trained_on(file, tmp_path):
    heldout = write(tmp_path / "heldout.jsonl", sums([3, 3, 500]))
    jsonl = task(file, heldout_path=heldout)
    assert {asked(e) for e in jsonl.heldout_examples(2)} == {"3 + 3?", "500 + 500?"}
    train = {asked(jsonl.train_example(index)) for index in range(199)}
    assert train == {f"{n} + {n}?" for n in range(200) if n != 3}


def test_rewards_of_a_group_are_in_order(file):
    reward = AnswerReward(name="numeric", format_reward=0.5)
    rewards = task(file, reward=reward).reward([rollout("so 4"), rollout(""), rollout("5")], "4")
    assert [(r.value, r.correct) for r in rewards] == [(1.5, True), (0.0, False), (0.5, False)]


@pytest.mark.parametrize(
    ("lines", "settings", "message"),
    [
        (sums([1]), {}, r"too few lines \(1\): none of them would be (held out|trained on)"),
        (sums(range(9)), {"heldout_share": 1e-9}, r"\(9\): none of them would be held out"),
        (sums(range(9)), {"heldout_share": 1 - 1e-9}, r"\(9\): none .* trained on; add lines"),
        ([{"question": "?", "answer": "x"}] * 9, {}, r"too few lines \(9\)"),
        ([*sums([1]), {"question": "?"}], {}, r"line 2: it has no field 'answer'"),
    ],
)
def test_a_file_without_enough_is_refused(tmp_path, lines, settings, message):
    with pytest.raises(ValueError, match=message):
        task(write(tmp_path / "few.jsonl", lines), **settings).check()


def test_two_files_with_the_same_questions_are_refused(file):
    with pytest.raises(ValueError, match=r"all questions of .* none is left to train on"):
        task(file, heldout_path=file).check()


def test_all_heldout_questions_are_taken_where_there_are_fewer_than_asked_for(file, tmp_path):
    all_of_them = {q for n in range(200) if is_heldout(q := f"{n} + {n}?", 0.1)}
    assert {asked(e) for e in task(file).heldout_examples(200)} == all_of_them
    heldout = write(tmp_path / "heldout.jsonl", sums([500]))
    assert len(task(file, heldout_path=heldout).heldout_examples(2)) == 1


def test_a_line_of_the_heldout_file_is_named_too(file, tmp_path):
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text("x\n")
    with pytest.raises(ValueError, match=r"heldout\.jsonl has 1 bad line of 1:\n  line 1: it is n"):
        task(file, heldout_path=heldout).check()


@pytest.mark.parametrize(
    ("answer", "settings", "bad"),
    [
        ("four", {}, True),
        ("4 km", {}, False),
        (4, {}, False),
        (0, {}, False),
        ("2 + 2 #### four", {"marker": "####"}, True),
        ("2 + 2 #### 4", {"marker": "####"}, False),
    ],
)
def test_a_numeric_answer_needs_a_number(tmp_path, answer, settings, bad):
    lines = [*sums(range(40)), {"question": "q", "answer": answer}]
    reward = AnswerReward(name="numeric", **settings)
    jsonl = task(write(tmp_path / "sums.jsonl", lines), reward=reward)
    if bad:
        with pytest.raises(ValueError, match=r"line 41: the answer '.*four' has no number"):
            jsonl.check()
    else:
        jsonl.check()


MINE = """
def one_of(answer, expected):
    return answer in expected["accepted"]
"""


def test_a_reward_of_ones_own_takes_any_answer_and_is_tried_before_the_run(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    lines = [{"question": str(n), "answer": {"accepted": ["a", "b"]}} for n in range(40)]
    reward = AnswerReward(name="my_rewards:one_of")
    jsonl = task(write(tmp_path / "any.jsonl", lines), reward=reward)
    jsonl.check()
    rewards = jsonl.reward([rollout("b"), rollout("c")], jsonl.train_example(0).expected_answer)
    assert [r.correct for r in rewards] == [True, False]
    bad = task(write(tmp_path / "sums.jsonl", sums(range(40))), reward=reward)
    with pytest.raises(ValueError, match=r"my_rewards:one_of' raised TypeError.*my_rewards\.py:3"):
        bad.check()


def test_a_relative_path_is_that_of_the_folder_the_config_was_made_in(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Jsonl.Config(path="sums.jsonl", heldout_path="./other/../heldout.jsonl")
    assert config.path == file
    assert config.heldout_path == str(tmp_path / "heldout.jsonl")
    monkeypatch.chdir("/")
    travelled = cloudpickle.loads(cloudpickle.dumps(Jsonl.Config(path=file)))
    assert asked(travelled.build(seed=1).train_example(5)) == asked(task(file, 1).train_example(5))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Jsonl.Config(path="~/sums.jsonl").path == file


def test_a_grader_needs_no_file(file):
    config = Jsonl.Config(path=file)
    os.unlink(file)
    [reward] = config.build(seed=0).reward([rollout("4")], "4")
    assert reward.correct


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heldout_share": 0.0}, r"task\.heldout_share must be in \(0, 1\); got 0"),
        ({"heldout_share": 1.0}, r"task\.heldout_share must be in \(0, 1\); got 1"),
        ({"question_field": ""}, r"task\.question_field and task\.answer_field need a name"),
        ({"question_field": "answer"}, "are both 'answer': the model would see the answer"),
    ],
)
def test_a_bad_config_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Jsonl.Config(path="sums.jsonl", **settings)


def test_a_task_without_a_file_says_how_to_give_one():
    with pytest.raises(ValueError, match=r"task 'jsonl' has no file: .* --task\.path my\.jsonl"):
        Jsonl.Config().build(seed=0).check()


def test_files_can_be_mixed(file, tmp_path):
    other = write(tmp_path / "more.jsonl", sums(range(1000, 1200)))
    parts = [Jsonl.Config(path=file), Jsonl.Config(path=other, name="more")]
    mixture = Mixture.Config(tasks=parts).build(seed=0)
    tasks = {mixture.train_example(index).task for index in range(20)}
    assert tasks == {"jsonl", "more"}
    assert len(mixture.heldout_examples(10)) == 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "task 'jsonl' has no file: set its path, as in --task.path my.jsonl"),
        ("--task.path nowhere.jsonl", "there is no file .*/nowhere.jsonl"),
        ("--task.path bad.jsonl", r"bad.jsonl has 2 bad lines of 3:\n line 2: .*\n line 3: "),
        ("--task.path sums.jsonl --task.answer_field target", "and 190 more"),
        ("--task.path sums.jsonl --task.heldout_share 1e-9", "none of them would be held out; add"),
        ("--task.path sums.jsonl --task.heldout_share 2", "heldout_share must be in"),
        ("--task.path sums.jsonl --task.reward.name numreic", "did you mean 'numeric'"),
        ("--task.path sums.jsonl --task.reward.kwargs tolerance 1", "it takes ignore_case"),
        ("--task.path long.jsonl --task.heldout_share 0.4", r"long.jsonl, line 7: 6.. tokens"),
    ],
)
def test_a_recipe_with_overrides_is_checked_before_the_run(
    file, tmp_path, monkeypatch, tiny_model, capsys, arguments, said
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text(f"{json.dumps(sums([1])[0])}\nnot json\n[]\n")
    long = {"question": "x" * 600, "answer": "y"}
    write(tmp_path / "long.jsonl", [*sums(range(6)), long, *sums(range(6, 200))])
    command = ["--config", "grpo_jsonl", "--module", str(ROOT / "config_registry.py")]
    command += ["--model", str(tiny_model), *arguments.split()]
    with pytest.raises((ValueError, SystemExit)) as error:
        check(parse(command))
    shown = capsys.readouterr()  # where tyro says what it refuses
    assert re.search(said, re.sub(r"[│ ]+", " ", f"{error.value}{shown.out}{shown.err}"))


@pytest.mark.parametrize(("settings", "told"), [("", 1), ("--evaluation.prompts 5", 0)])
def test_a_run_of_a_small_file_says_once_that_its_evaluations_are(
    file, tmp_path, monkeypatch, tiny_model, capsys, settings, told
):
    monkeypatch.chdir(tmp_path)
    command = f"--config grpo_jsonl --model {tiny_model} --task.path {file} {settings}"
    check(parse(command.split()))
    few = len(task(file).heldout_examples(50))
    note = f"note: evaluations are of {few} held-out prompts: task 'jsonl' has fewer than"
    assert capsys.readouterr().out.count(note) == told


def test_a_hundred_thousand_lines_are_no_burden(tmp_path):
    path = write(tmp_path / "large.jsonl", sums(range(100_000)))
    began = time.process_time()
    jsonl = task(path)
    jsonl.check()
    assert len({asked(jsonl.train_example(index)) for index in range(0, 85_000, 17)}) == 5000
    # A second by itself; what would take a pass over the file an example would take minutes.
    assert time.process_time() - began < 10
