"""`torchtitan-rl`: its commands, and that none of them waits for torch before it must."""

import signal
import subprocess
import sys

import pytest

import torchtitan_rl
from torchtitan_rl.cli.main import COMMANDS, main

HEAVY = {"monarch", "torch", "torchtitan", "transformers", "vllm"}


def imported(code: str, *, cwd=None) -> set[str]:
    """Which heavy libraries a process has imported after running the code."""
    ending = f"\nimport sys\nprint('IMPORTED', *sorted({HEAVY!r} & sys.modules.keys()))"
    run = subprocess.run(
        [sys.executable, "-c", code + ending], capture_output=True, text=True, cwd=cwd
    )
    assert run.returncode == 0, run.stdout + run.stderr
    [said] = [line for line in run.stdout.splitlines() if line.startswith("IMPORTED")]
    return set(said.split()[1:])


COMMAND = """
from torchtitan_rl.cli.main import main
try:
    code = main({arguments!r})
except SystemExit as exit:
    code = exit.code
assert code == {code}, code
"""


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("list", 0),
        ("train --config echo_calculator_tiny --help", 0),
        ("train --config grpo_sum_digits_tiny --trainer.loss.name grop", 2),
        ("train --config grpo_sum_digits_tiny --steps many", 2),
        ("view nowhere", 2),
        ("plan --config grpo_sum_digits_tiny --help", 0),
        ("plan --config grpo_sum_digits_tiny --gpus 8xH1", 2),
    ],
)
def test_what_needs_no_torch_imports_none(command, code, tmp_path):
    assert imported(COMMAND.format(arguments=command.split(), code=code), cwd=tmp_path) == set()


TRAIN_AND_SAY_SO = """
import sys
from torchtitan_rl.cli import main, train
train.SILENT_SECONDS = 0.0  # else a quick machine has imported torch before anything is said
sys.exit(main.main(["train", "--config", "grpo_sum_digits_tiny"]))
"""


def test_ctrl_c_while_torch_is_imported_ends_quietly(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", TRAIN_AND_SAY_SO],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "loading torch and Monarch ...\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) in ((-signal.SIGINT, ""), (130, ""))
    assert not list(tmp_path.iterdir())


def test_every_command_says_what_it_does(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name}" in said
        assert command.__doc__ in said
        with pytest.raises(SystemExit, match="0"):
            sys.exit(main([name, "--help"]))
        assert f"usage: torchtitan-rl {name}" in capsys.readouterr().out


def test_an_unknown_command_is_answered_with_the_nearest(capsys):
    assert main(["trian"]) == 2
    assert "unknown command 'trian'; did you mean 'train'" in capsys.readouterr().err
    assert main([]) == 2


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == torchtitan_rl.__version__


def test_the_modules_are_commands_too(tmp_path):
    for module, arguments in (
        ("torchtitan_rl", ["list"]),
        ("torchtitan_rl.train", ["--list"]),
    ):
        run = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=True,
        )
        assert "grpo_sum_digits_tiny " in run.stdout
