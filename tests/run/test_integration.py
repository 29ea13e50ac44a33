"""The integration suite: its quick part for real, and how it answers a wrong question."""

import pytest

import integration_tests
from torchtitan_rl.recipes import registry as recipes


def test_the_quick_flavors_pass(tmp_path, capfd):
    arguments = [str(tmp_path), "--test_suite", "cpu", "--test_name", "quick", "--ngpu", "0"]
    assert integration_tests.main(arguments) == 0, capfd.readouterr().out
    assert "0 failed" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--test_name", "two_rank"], "did you mean 'two_ranks'"),
        (["--test_suite", "gpu"], "need 2 GPUs; --ngpu is 0"),
        (["--test_suite", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_a_wrong_question_is_answered(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit):
        integration_tests.main([str(tmp_path), *arguments])
    assert message in capsys.readouterr().err


def test_flavors_use_recipes_that_exist():
    known = recipes.built_in_recipes()
    for flavor in (f for suite in integration_tests.SUITES.values() for f in suite):
        assert flavor.recipe in known
