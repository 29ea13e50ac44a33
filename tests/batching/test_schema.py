"""Per-token fields: what each episode's streams are, how they are padded, what is refused."""

import math

import pytest
import torch

from tests.support import episode
from torchtitan_rl.batching.schema import (
    FIELDS,
    Field,
    loss_mask,
    microbatch,
    present_fields,
    validate,
)

NAN = math.nan
OPTIONAL = {"generator_logprobs", "ref_logprobs"}


def full_episode(**changes):
    """An episode with every optional field."""
    return episode(**{"ref_logprobs": [-0.25, -2.0], **changes})


def rows(tensor):
    return [pytest.approx(row, nan_ok=True) for row in tensor.tolist()]


@pytest.mark.parametrize(
    ("name", "dtype", "stream"),
    [
        ("tokens", torch.int64, [1, 2, 3, 4, 5]),
        ("loss_mask", torch.bool, [False, False, False, True, True]),
        ("advantages", torch.float32, [0.5] * 5),
        ("temperatures", torch.float32, [0.7] * 5),
        ("weights", torch.float32, [0.25] * 5),
        ("generator_logprobs", torch.float32, [NAN, NAN, NAN, -0.5, -1.0]),
        ("ref_logprobs", torch.float32, [NAN, NAN, NAN, -0.25, -2.0]),
    ],
)
def test_an_episode_becomes_one_stream_per_field(name, dtype, stream):
    episodes = [full_episode(temperature=0.7, weight=0.25)]
    batch = microbatch(episodes, present_fields(episodes))
    assert batch[name].dtype == dtype
    assert rows(batch[name]) == [stream]


def test_every_field_of_the_schema_is_in_the_table_above():
    assert [field.name for field in FIELDS] == [
        "tokens",
        "loss_mask",
        "advantages",
        "temperatures",
        "weights",
        "generator_logprobs",
        "ref_logprobs",
    ]
    assert {field.name for field in FIELDS if field.optional} == OPTIONAL


def test_an_episodes_own_loss_mask_counts():
    mask = [False, True, False, True, False]
    batch = microbatch([full_episode(loss_mask=mask)], FIELDS)
    assert batch["loss_mask"].tolist() == [mask]


def test_shorter_rows_are_padded_on_the_right():
    short = full_episode(token_ids=[], token_logprobs=[], ref_logprobs=[], weight=2.0)
    batch = microbatch([full_episode(), short], FIELDS)
    assert rows(batch["tokens"])[1] == [1, 2, 3, 0, 0]
    assert rows(batch["loss_mask"])[1] == [False] * 5
    assert rows(batch["advantages"])[1] == [0.5, 0.5, 0.5, 0, 0]
    assert rows(batch["temperatures"])[1] == [1.0] * 5
    assert rows(batch["weights"])[1] == [2.0, 2.0, 2.0, 0, 0]
    assert rows(batch["generator_logprobs"])[1] == [NAN] * 5
    assert rows(batch["ref_logprobs"])[1] == [NAN] * 5


def test_an_optional_field_that_all_have_is_present():
    assert present_fields([full_episode(), full_episode()]) == list(FIELDS)


def test_an_optional_field_that_none_has_is_absent():
    present = present_fields([episode(token_logprobs=None)] * 2)
    assert {field.name for field in FIELDS} - {field.name for field in present} == OPTIONAL


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"token_logprobs": None}, "generator_logprobs"), ({"ref_logprobs": None}, "ref_logprobs")],
)
def test_an_optional_field_that_some_have_is_an_error_that_names_an_episode_without(changes, name):
    with_and_without = [full_episode(), full_episode(task="chat", group_id="chat/3", **changes)]
    with pytest.raises(ValueError, match=f"'chat', group 'chat/3' has no {name}"):
        present_fields(with_and_without)


def test_a_required_field_that_none_has_is_an_error():
    required = Field("prices", torch.float32, 0.0, lambda e: None)
    with pytest.raises(ValueError, match="has no prices"):
        present_fields([episode(), episode()], [*FIELDS, required])


def test_a_field_without_a_pad_value_cannot_be_declared():
    with pytest.raises(TypeError, match="pad"):
        Field("prices", torch.float32, of=lambda e: [0.0] * e.length)


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_the_padding_cell_carries_each_present_field(field):
    cell = microbatch([], FIELDS)
    assert cell[field.name].dtype == field.dtype
    assert cell[field.name].shape == (1, 1)
    assert cell[field.name].item() == pytest.approx(field.pad, nan_ok=True)


def test_the_padding_cell_carries_no_absent_field():
    present = present_fields([episode(token_logprobs=None)])
    assert microbatch([], present).keys() == {field.name for field in present}


def test_a_new_optional_field_shows_up_in_rows_and_in_the_padding_cell():
    new = Field("echo_alpha", torch.float64, 0.25, lambda e: [2.0] * e.length, optional=True)
    episodes = [episode(), episode(token_ids=[4], token_logprobs=[-0.5])]
    present = present_fields(episodes, [*FIELDS, new])
    batch, padding = microbatch(episodes, present), microbatch([], present)
    assert batch["echo_alpha"].tolist() == [[2.0] * 5, [2.0] * 4 + [0.25]]
    assert padding["echo_alpha"].tolist() == [[0.25]]
    assert padding["echo_alpha"].dtype == batch["echo_alpha"].dtype == torch.float64


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"token_logprobs": None},
        {"ref_logprobs": [-0.5, -1.0], "weight": 0.0},
        {"loss_mask": [False, True, True, False, True]},
        {"token_ids": [], "token_logprobs": []},
        {"policy_version": 3},
        {"prompt_token_ids": [0, 1, 9]},
        {"advantage": -2.0, "temperature": 0.1},
    ],
)
def test_a_good_episode_is_valid(changes):
    validate([episode(**changes)], vocab_size=10, version=3)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"token_ids": [4, 10]}, r"token id 10 lies outside 0\.\.9"),
        ({"prompt_token_ids": [1, 10, 3]}, r"token id 10 lies outside 0\.\.9"),
        ({"token_ids": [4, -1]}, "token id -1 is negative"),
        ({"token_logprobs": [-0.5]}, "generator_logprobs covers 4 tokens of 5"),
        ({"token_logprobs": [-0.5] * 3}, "generator_logprobs covers 6 tokens of 5"),
        ({"token_logprobs": [-0.5, NAN]}, "token_logprobs holds a value that is not finite"),
        ({"token_logprobs": [-0.5, -math.inf]}, "token_logprobs holds a value that is not finite"),
        ({"ref_logprobs": [-0.5]}, "ref_logprobs covers 4 tokens of 5"),
        ({"ref_logprobs": [-0.5, NAN]}, "ref_logprobs holds a value that is not finite"),
        ({"loss_mask": [False, True]}, "loss_mask covers 2 tokens of 5"),
        ({"loss_mask": [True] * 5}, "loss_mask trains token 0"),
        ({"advantage": NAN}, "the advantage is nan"),
        ({"advantage": math.inf}, "the advantage is inf"),
        ({"weight": NAN}, "the weight is nan"),
        ({"weight": math.inf}, "the weight is inf"),
        ({"temperature": 0.0}, r"the temperature is 0\.0; greedy"),
        ({"temperature": -1.0}, r"the temperature is -1\.0"),
        ({"temperature": NAN}, "the temperature is nan"),
        ({"policy_version": 4}, "policy version 4 is newer than the trainer's 3"),
    ],
)
def test_a_bad_episode_is_refused_by_task_and_group(changes, problem):
    bad = episode(task="chat", group_id="chat/train/3", **changes)
    with pytest.raises(ValueError, match=problem) as error:
        validate([episode(), bad], vocab_size=10, version=3)
    assert "task 'chat', group 'chat/train/3'" in str(error.value)


def test_a_negative_id_is_refused_without_a_vocabulary_and_without_an_impossible_range():
    with pytest.raises(ValueError, match="token id") as error:
        validate([episode(token_ids=[4, -5])])
    assert "0..-1" not in str(error.value)


def test_ids_and_versions_are_unbounded_without_bounds():
    validate([episode(token_ids=[4, 10**6], policy_version=10**6)])


@pytest.mark.parametrize(
    ("changes", "needs", "problem"),
    [
        ({"token_logprobs": None}, "generator_logprobs", "it has no generator_logprobs, which"),
        ({"ref_logprobs": None}, "ref_logprobs", "it has no ref_logprobs, which"),
    ],
)
def test_a_field_that_a_setting_needs_is_asked_of_every_episode(changes, needs, problem):
    wanted = {needs: "trainer.loss.some_term"}
    validate([full_episode()], needs=wanted)
    validate([full_episode(**changes)])
    bad = full_episode(task="chat", group_id="chat/train/3", **changes)
    with pytest.raises(ValueError, match=f"{problem} trainer.loss.some_term needs") as error:
        validate([full_episode(), bad], needs=wanted)
    assert "task 'chat', group 'chat/train/3'" in str(error.value)


def test_a_prompt_token_cannot_train_where_logprobs_of_sampled_tokens_are_needed():
    trains_prompt = full_episode(loss_mask=[False, True, False, True, True])
    validate([trains_prompt])
    for field in ("generator_logprobs", "ref_logprobs"):
        with pytest.raises(ValueError, match=field):
            validate([trains_prompt], needs={field: "trainer.loss.some_term"})


def test_the_tokens_that_train_are_those_of_the_completion_unless_a_mask_says_otherwise():
    assert loss_mask(episode()) == [False, False, False, True, True]
    assert loss_mask(episode(token_ids=[])) == [False, False, False]
    mask = [False, True, False, False, True]
    assert loss_mask(episode(loss_mask=mask)) == mask
