"""`--dry_run`: a prompt of each task, sampled and graded by the real actors, and shown."""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.run.lookup import Lookup
from tests.support import ONE_THREAD, low_tokens
from torchtitan_rl.config import GeneratorConfig
from torchtitan_rl.run.dry_run import DryRunError, dry_run
from torchtitan_rl.run.launch import describe
from torchtitan_rl.tasks.mixture import Mixture

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def no_signals(controller):
    yield


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder in which dry runs leave their logs, if they fail."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_file_of_questions_is_shown_with_what_the_real_engine_makes_of_it(tiny_model, tmp_path):
    lines = [json.dumps({"question": f"What is {n} + 1?", "answer": n + 1}) for n in range(50)]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    command = f"""-m torchtitan_rl train --config grpo_jsonl --task.path sums.jsonl --dry_run
        --task.reward.name numeric --model {tiny_model} --generator.sampling.max_tokens 8
        --generator.sampling.n 6 --generator.engine.kv_cache_gib 0.1 {" ".join(ONE_THREAD)}"""
    (tmp_path / "tmp").mkdir()
    run = subprocess.run(
        [sys.executable, *command.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for said in (
        "│ <|im_start|>user\n  │ What is ",  # as the model gets it
        "sampled   6 times at temperature 1, at most 8 tokens",
        "sample 3\n  prompt    user: What is ",
        "\n  said      ",
        "\n  expected  ",
        "\n  reward    0 (numeric 0, format 0), wrong, ",
        "(2 more)",
        "note: rewards: ",
        "the dry run went well",
    ):
        assert said in run.stdout
    assert "trainer" not in run.stdout
    assert not (tmp_path / "outputs").exists()
    assert not list((tmp_path / "tmp").glob("torchtitan-rl-*"))


def config_for(folder, model, task):
    backend = "tests.run.calling_generator:CallingGenerator"
    base = low_tokens()
    generator = GeneratorConfig(
        backend=backend, sampling=base.generator.sampling, engine=base.generator.engine
    )
    return replace(
        base, model=str(model), task=task, generator=generator, output_dir=str(folder), run_name="x"
    )


async def test_tools_are_called_and_every_task_of_a_mixture_has_its_prompt(
    tiny_model, temporary, capsys
):
    task = Mixture.Config(tasks=[Lookup.Config(), Lookup.Config(name="atlas")])
    await dry_run(config_for(temporary, tiny_model, task), no_signals)
    said = capsys.readouterr().out
    for name in ("lookup", "atlas"):
        assert f"prompt    {name}/train/" in said
    assert 'said      → lookup({"city": "Rome"})\n            tool lookup: Italy\n' in said
    assert "            Italy\n  expected  Italy\n  reward    1, correct, " in said
    assert "note: rewards: 0 1 0 0" in said
    assert not list(temporary.glob("torchtitan-rl-*"))


async def test_a_tool_that_fails_fails_the_dry_run(tiny_model, temporary, capsys):
    config = config_for(temporary, tiny_model, Lookup.Config(broken=True))
    with pytest.raises(DryRunError) as error:
        await dry_run(config, no_signals)
    said = describe(error.value)
    assert said.startswith(
        "tool 'lookup' of task 'lookup' failed: raised ConnectionError: the atlas is gone ("
    )
    assert "lookup.py:" in said
    # The logs are kept, and said.
    [folder] = temporary.glob("torchtitan-rl-*")
    assert f"(logs: {folder}/run/logs)" in said
    assert "the atlas is gone" in (folder / "run/logs/environment.log").read_text()
    assert "tool lookup: error: lookup raised ConnectionError" in capsys.readouterr().out
