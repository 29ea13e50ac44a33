"""What an unknown flag may stand for."""

import pytest

from torchtitan_rl.cli.suggestions import NAMES_ELSEWHERE, describe_unknown, setting_names, suggest
from torchtitan_rl.recipes import echo_calculator_tiny, grpo_sum_digits_tiny
from torchtitan_rl.tasks.jsonl import Jsonl

NAMES = list(setting_names(grpo_sum_digits_tiny()))


def test_the_table_names_settings_that_exist_by_names_that_do_not():
    known = {*NAMES, *setting_names(Jsonl.Config(), "task."), "dry_run"}
    assert set(NAMES_ELSEWHERE) <= known
    elsewhere = [name for names in NAMES_ELSEWHERE.values() for name in names]
    assert len(elsewhere) == len(set(elsewhere))
    assert not known & set(elsewhere)


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--learning_rate", "trainer.optimizer.lr"),
        ("--lr", "trainer.optimizer.lr"),
        ("--trainer.lr", "trainer.optimizer.lr"),
        ("--batch-size", "prompts_per_step"),
        ("--epochs", "steps"),
        ("--temperature", "generator.sampling.temperature"),
        ("--num_generations", "generator.sampling.n"),
        ("--max_new_tokens", "generator.sampling.max_tokens"),
        ("--beta", "trainer.loss.ref_kl.coef"),
        ("--kl_coef", "trainer.loss.ref_kl.coef"),
        ("--top_p", "generator.sampling.top_p"),
        ("--weight_decay", "trainer.optimizer.weight_decay"),
        ("--max_grad_norm", "trainer.max_grad_norm"),
        ("--stepz", "steps"),
        ("--generator.samplin.n", "generator.sampling.n"),
        ("--optimizer.lr", "trainer.optimizer.lr"),
        ("--dryrun", "dry_run"),
        ("--no-log.samples", "log.no-samples"),
    ],
)
def test_the_setting_that_was_meant_is_first(flag, meant):
    assert suggest(flag, NAMES)[0] == meant


def test_settings_of_a_recipes_tasks_are_known_and_those_of_others_are_not():
    names = list(setting_names(echo_calculator_tiny()))
    assert "task.tasks.0.name" in names
    assert suggest("--dataset", names) == []


def test_several_unknown_flags_and_their_values_are_told_apart():
    unknown = ["--lr", "-1", "--xyzzy=3", "word"]
    assert describe_unknown(unknown, iter(NAMES), prog="train") == (
        "there is no setting --lr: did you mean --trainer.optimizer.lr?; there is no setting "
        "--xyzzy (train --help lists all settings)"
    )


def test_what_torchtitan_has_and_we_do_not_is_answered_with_the_reason():
    unknown = ["--trainer.parallelism.context_parallel_degree", "2"]
    assert "cannot split rows of packed documents" in describe_unknown(
        unknown, iter(NAMES), prog="train"
    )
