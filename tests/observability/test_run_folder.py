"""outputs/<run>/: where things are, what may be resumed, what changed."""

import json
import os
import shutil

import pytest

from torchtitan_rl.observability.run_folder import (
    RunFolder,
    RunFolderError,
    describe_runs,
    find_checkpoints,
)

CONFIG = {"steps": 10, "resume": False, "trainer": {"optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "outputs" / "run"


def existing_run(path):
    RunFolder(path, resume=False).create(CONFIG)


def test_looking_at_a_new_run_writes_nothing(path):
    RunFolder(path, resume=False)
    assert not path.parent.exists()


def test_a_new_run_gets_its_config_and_its_logs_folder(path):
    folder = RunFolder(path, resume=False)
    assert folder.create(CONFIG) == []
    assert json.loads((path / "config.json").read_text()) == CONFIG
    assert {file.name for file in path.iterdir()} == {"config.json", "logs"}
    assert folder.log_file("trainer") == str(path / "logs" / "trainer.log")


def test_a_run_keeps_the_tokenizer_of_its_model(path, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    RunFolder(path, resume=False).create(CONFIG, model=model)
    assert not (path / "tokenizer.json").exists()
    (model / "tokenizer.json").write_text("{}")
    RunFolder(path, resume=True).create(CONFIG, model=model)
    assert (path / "tokenizer.json").read_text() == "{}"


def test_an_existing_run_is_not_overwritten(path):
    existing_run(path)
    with pytest.raises(RunFolderError, match=r"run already holds a run.*--resume.*--run_name"):
        RunFolder(path, resume=False)


def test_a_folder_without_a_config_is_no_run(path):
    path.mkdir(parents=True)
    RunFolder(path, resume=False)
    with pytest.raises(RunFolderError, match="no run"):
        RunFolder(path, resume=True)


def test_resuming_what_does_not_exist_is_an_error(path):
    with pytest.raises(
        RunFolderError, match=r"--resume found no run in .*run: drop --resume to start it, or"
    ):
        RunFolder(path, resume=True)


def test_resuming_what_does_not_exist_names_the_runs_there_are(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert describe_runs("outputs") == "There are no runs in outputs"
    existing_run(path.parent / "old")
    existing_run(path.parent / "new")
    os.utime(path.parent / "old" / "config.json", (0, 0))
    (path.parent / "models").mkdir()
    (path.parent / "models" / "config.json").write_text("{}")  # a model, and no run
    with pytest.raises(RunFolderError, match=r"Runs in outputs: new, old$"):
        RunFolder(path, resume=True)
    for number in range(10):
        existing_run(path.parent / f"more-{number}")
    assert describe_runs("outputs").endswith(", more-0, and 2 more")


def test_errors_name_the_folder_from_where_the_user_is(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFolderError, match="found no run in outputs/run:"):
        RunFolder(path, resume=True)


def test_a_relative_folder_stays_where_it_was_when_the_process_moves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder("outputs/run", resume=False)
    monkeypatch.chdir("/")
    folder.create(CONFIG)
    assert (tmp_path / "outputs" / "run" / "config.json").is_file()


def test_resuming_with_the_same_config_changes_nothing(path):
    existing_run(path)
    resumed = RunFolder(path, resume=True)
    assert resumed.create({**CONFIG, "resume": True}) == []


def test_resuming_tells_what_changed_by_its_full_name(path):
    existing_run(path)
    changed = {**CONFIG, "resume": True, "steps": 20, "evaluation": {"every": 3}}
    assert RunFolder(path, resume=True).create(changed) == [
        "evaluation.every: None → 3",
        "steps: 10 → 20",
    ]
    assert json.loads((path / "config.json").read_text())["steps"] == 20


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 3}, "cannot change seed: 0 → 3"),
        ({"task": {"name": "other"}}, "cannot change task.name: sums → other"),
        ({"trainer": {"optimizer": {"lr": 9.0}}}, "trainer.optimizer.lr: 0.1 → 9.0"),
    ],
)
def test_resuming_refuses_to_change_what_the_run_computes(path, change, says):
    started = {**CONFIG, "seed": 0, "task": {"name": "sums"}}
    RunFolder(path, resume=False).create(started)
    before = (path / "config.json").read_text()
    with pytest.raises(RunFolderError, match=says):
        RunFolder(path, resume=True).create(
            {**started, **change}, fixed=("seed", "task", "trainer.optimizer")
        )
    assert (path / "config.json").read_text() == before


def test_a_refusal_says_what_may_change_and_how_to_change_the_rest(path, monkeypatch):
    monkeypatch.chdir(path.parents[1])
    RunFolder(path, resume=False).create({**CONFIG, "seed": 0})
    with pytest.raises(
        RunFolderError,
        match=r"seed: 0 → 1\. It may change steps, log\.\*\. For anything else start a new run "
        r"from its checkpoint: --fork_from outputs/run --run_name <new name>, without --resume$",
    ):
        RunFolder(path, resume=True).changes(
            {**CONFIG, "seed": 1}, fixed=["seed"], free=["steps", "log.*"]
        )


def test_the_model_that_a_run_started_from_is_written_and_is_no_setting(path, tmp_path):
    RunFolder(path, resume=False).create(CONFIG, model=tmp_path / "model")
    folder = RunFolder(path, resume=True)
    assert folder.read_config() == {**CONFIG, "starting_model": str(tmp_path / "model")}
    assert folder.changes(CONFIG) == []


def test_a_checkpoint_is_taken_over_whole_and_survives_its_source(path, tmp_path):
    source = tmp_path / "source"
    (source / "checkpoints" / "step-4").mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp"):
        (source / "checkpoints" / "step-4" / name).write_text(name)
    folder = RunFolder(path, resume=False)
    for half_done in (".copy-4", "step-4"):  # by a process that was killed
        (folder.checkpoints / half_done).mkdir(parents=True)
    folder.copy_checkpoint(source, 4)
    folder.copy_checkpoint(source, 4)
    shutil.rmtree(source)
    assert find_checkpoints(folder.checkpoints) == [4]
    [copied] = folder.checkpoints.iterdir()
    assert (copied / "__0_0.distcp").read_text() == "__0_0.distcp"
    with pytest.raises(RunFolderError, match=r"checkpoint step-2 of .*source cannot be copied"):
        folder.copy_checkpoint(source, 2)


def test_resuming_refuses_arguments_the_loss_did_not_have(path):
    RunFolder(path, resume=False).create({"trainer": {"loss": {"kwargs": {}}}})
    changed = {"trainer": {"loss": {"kwargs": {"clip_low": 0.1}}}}
    with pytest.raises(RunFolderError, match=r"trainer.loss.kwargs: \{\} → \{'clip_low': 0.1\}"):
        RunFolder(path, resume=True).changes(changed, fixed=["trainer.loss"])


def test_a_run_of_before_settings_were_renamed_is_compared_by_their_new_names(path):
    old = {"thinking": True, "environment": {"timeout_seconds": 30.0, "concurrent_calls": 4}}
    RunFolder(path, resume=False).create(old)
    folder = RunFolder(path, resume=True)
    environment = {"timeout_seconds": 30.0, "concurrent_calls": 8}
    fixed = ("rollout.thinking", "rollout.environment.timeout_seconds")
    changed = {"rollout": {"thinking": True, "environment": environment}}
    assert folder.changes(changed, fixed=fixed) == ["rollout.environment.concurrent_calls: 4 → 8"]
    changed["rollout"]["thinking"] = False
    with pytest.raises(RunFolderError, match=r"cannot change rollout.thinking: True → False"):
        folder.changes(changed, fixed=fixed)


def test_a_tuple_in_the_config_is_no_change(path):
    with_tuple = {"trainer": {"betas": (0.9, 0.99)}}
    RunFolder(path, resume=False).create(with_tuple)
    assert RunFolder(path, resume=True).create(with_tuple) == []


@pytest.mark.parametrize(
    ("whole", "half", "latest"),
    [([], [], None), ([], [3], None), ([9, 10], [], 10), ([2], [3], 2)],
)
def test_the_latest_checkpoint_is_the_newest_whole_one(path, whole, half, latest):
    folder = RunFolder(path, resume=False)
    for step in whole + half:
        (folder.checkpoints / f"step-{step}").mkdir(parents=True)
    for step in whole:
        (folder.checkpoints / f"step-{step}" / ".metadata").touch()
    assert folder.latest_checkpoint() == latest


def test_steps_that_are_done_again_leave_no_files_of_the_first_time(tmp_path):
    folder = RunFolder(tmp_path / "run", resume=False)
    names = ["step-000004.jsonl", "step-000005.jsonl", "step-000005-evaluation.jsonl"]
    for part in (folder.rollouts, folder.tokens):
        part.mkdir(parents=True)
        for name in [*names, "step-000012-rank-1.jsonl", "notes.jsonl"]:
            (part / name).write_text("{}\n")
    folder.forget_steps_from(5)
    for part in (folder.rollouts, folder.tokens):
        assert {file.name for file in part.iterdir()} == {names[0], "notes.jsonl"}
