"""Whole runs from the command line: reproducible, resumable, interruptible, and tidy."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.run.killer import Killer
from tests.support import low_tokens
from torchtitan_rl.hosts.watched import has_ended
from torchtitan_rl.observability.json_lines import read_lines
from torchtitan_rl.observability.run_folder import find_checkpoints
from torchtitan_rl.observability.sinks import read_metrics
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.supervision.calls import WorkerDiedError

ROOT = Path(__file__).parents[2]


class Run:
    """A run in a process of its own, as a person would start it."""

    def __init__(self, model: Path, output_dir: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "torchtitan_rl.train", "--module", "tests.support"]
        command += ["--config", "low_tokens", "--model", str(model)]
        command += ["--output_dir", str(output_dir), "--run_name", "run", *arguments]
        # A session of its own, so that a Ctrl-C can be sent to all its processes at once.
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.folder = output_dir / "run"
        self.lines: list[str] = []
        self.arrived = threading.Condition()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self.arrived:
                    self.lines.append(line)
                    self.arrived.notify_all()

    def wait_for_line(self, text: str) -> None:
        def seen() -> bool:
            return any(text in line for line in self.lines)

        with self.arrived:
            assert self.arrived.wait_for(seen, timeout=120), f"no {text!r} in:\n{self.output}"

    def finish(self, timeout: float = 150) -> int:
        code = self.process.wait(timeout)
        self.reader.join(10)
        return code

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def processes(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def metrics(self) -> list[dict[str, float]]:
        return read_metrics(self.folder / "metrics.jsonl")


def numbers(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """What must not depend on how fast the machine was."""
    timed = ("time/", "tokens_per_second", "generators/died", "sync/", "turns/")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(processes, timeout=1)
    # What waits to be collected by another process has ended.
    assert not [process for process in left if not has_ended(process)]


@pytest.fixture(scope="module")
def finished(tiny_model, tmp_path_factory) -> Run:
    """One run from start to end."""
    run = Run(tiny_model, tmp_path_factory.mktemp("outputs"))
    run.wait_for_line("step    1")
    processes = run.processes()
    assert len(processes) >= 4  # controller, trainer, generator, grader
    assert run.finish() == 0, run.output
    assert_all_gone(processes)
    return run


def test_a_run_writes_what_it_promises(finished):
    rows = finished.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    promised = ["reward/all/mean", "mismatch/all/max", "tokens_per_second", "time/step"]
    promised += [f"time/{phase}" for phase in ("generate", "grade", "train", "sync")]
    for row in rows[:-1]:
        assert set(promised) <= row.keys()
        assert ("eval/accuracy" in row) == (row["step"] % 2 == 0)
        assert row["mismatch/all/max"] <= 1e-4
        assert row["policy_version"] == row["step"] + 1
        assert not [key for key in row if "echo" in key]  # it is off
    assert set(rows[-1]) == {"step", "eval/accuracy", "eval/reward", "eval/prompts"}
    assert rows[-1]["eval/reward"] > rows[0]["eval/reward"]
    config = json.loads((finished.folder / "config.json").read_text())
    assert config["task"]["name"] == "low_tokens"
    assert find_checkpoints(finished.folder / "checkpoints") == [2, 4, 6]
    assert list((finished.folder / "tensorboard").glob("events*"))
    spans = json.loads((finished.folder / "timeline.json").read_text())
    assert {"generate", "grade", "train"} <= {span["name"] for span in spans}


def test_every_number_is_explained(finished):
    document = (ROOT / "docs" / "metrics.md").read_text()
    names = [name for line in document.splitlines() for name in re.findall("`(.+?)`", line[:120])]
    known = [re.sub("<[a-z]+>", "[^/]+", name).replace("/*", "/(mean|std|max)") for name in names]
    keys = {key for row in finished.metrics() for key in row} - {"step"}
    assert [key for key in keys if not any(re.fullmatch(k, key) for k in known)] == []


def test_resuming_a_finished_run_says_so_and_starts_nothing(finished, tiny_model):
    again = Run(tiny_model, finished.folder.parent, "--resume")
    assert again.finish() == 0, again.output
    assert "has done its 6 steps" in again.output
    assert "starting the actors" not in again.output
    assert "+" in again.output  # the table


def test_a_run_tells_a_person_what_happened(finished):
    for text in (
        "starting the actors",
        "step    5  reward",
        "tok/s  generate",
        "held-out accuracy",
        "before",
        "after",
    ):
        assert text in finished.output
    assert "Traceback" not in finished.output


def test_the_final_model_loads_elsewhere_and_has_learned(finished, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(finished.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(finished.folder / "model")
    prompt = tokenizer("hello", return_tensors="pt").input_ids

    def low_mass(m) -> float:
        return m(prompt).logits[0, -1].softmax(-1)[:100].sum().item()

    assert low_mass(model) > low_mass(AutoModelForCausalLM.from_pretrained(tiny_model)) + 0.01


def test_the_trainer_alone_makes_the_same_model_of_the_saved_rollouts(
    finished, tiny_model, tmp_path
):
    """Without generator and grader, and resumed after a dead trainer: to the last bit; and what it
    computed is there by token."""
    source = ["--rollout.train_from", str(finished.folder), "--trainer.export_tokens"]
    run = Run(tiny_model, tmp_path, *source)
    names_the_dead(run, "trainer")
    run = Run(tiny_model, tmp_path, *source, "--resume")
    assert run.finish() == 0, run.output
    assert "nothing is generated, graded or evaluated" in run.output
    assert not [
        log for log in (run.folder / "logs").iterdir() if log.stem in ("generator", "grader")
    ]
    rows, originals = run.metrics(), finished.metrics()[:-1]
    for row, original in zip(numbers(rows), numbers(originals), strict=True):
        assert row == {k: v for k, v in original.items() if not k.startswith("eval/")}
        assert row["train/grad_norm"] > 0
    left, right = (r.folder / "model" / "model.safetensors" for r in (run, finished))
    assert left.read_bytes() == right.read_bytes()
    assert (run.folder / "tokenizer.json").read_bytes() == (
        tiny_model / "tokenizer.json"
    ).read_bytes()
    for step in range(6):
        name = f"rollouts/step-{step:06d}.jsonl"
        assert (run.folder / name).read_bytes() == (finished.folder / name).read_bytes()
        rollouts = [rollout for _, rollout in read_lines(run.folder / name)]
        tokens = list(read_lines(run.folder / f"tokens/step-{step:06d}-rank-0.jsonl"))
        assert len(tokens) == rows[step]["episodes"]
        sampled = {f"{r['group']}/{r['sample']}/0": r for r in rollouts}
        for _, record in tokens:
            rollout = sampled[record["name"]]
            [sequence] = rollout["sequences"]
            prompt = len(sequence["prompt_token_ids"])
            assert record["tokens"] == sequence["prompt_token_ids"] + sequence["token_ids"]
            assert record["rl"] == [0] * prompt + [1] * len(sequence["token_ids"])
            assert record["advantage"][prompt:] == pytest.approx(
                [rollout["advantage"]] * len(sequence["token_ids"])
            )
            assert record["trainer_logprobs"][prompt:] == pytest.approx(
                sequence["token_logprobs"], abs=1e-4
            )


def test_a_fork_goes_on_like_its_source_and_its_resume_learns_half_as_fast(
    finished, tiny_model, tmp_path
):
    """The trainer alone, on the same rollouts: the fork's step is the source's to the last bit, and
    the next one, with half the learning rate, moves the weights half as far."""
    arguments = ["--rollout.train_from", str(finished.folder)]
    arguments += ["--fork_from", f"{finished.folder}@4"]
    fork = Run(tiny_model, tmp_path, *arguments, "--steps", "5")
    assert fork.finish() == 0, fork.output
    assert f"forked from {finished.folder}@4" in fork.output
    fourth, fifth = weights(fork), weights(finished)
    lower = ["--steps", "6", "--trainer.optimizer.lr", "5e-4"]
    resumed = Run(tiny_model, tmp_path, *arguments, "--resume", *lower)
    assert resumed.finish() == 0, resumed.output
    assert "changed since the run started: trainer.optimizer.lr: 0.001 → 0.0005" in resumed.output
    rows, originals = numbers(resumed.metrics()), numbers(finished.metrics()[4:6])
    originals = [{k: v for k, v in r.items() if not k.startswith("eval/")} for r in originals]
    assert rows == [originals[0], {**originals[1], "train/learning_rate": 5e-4}]
    for name, before in fourth.items():
        whole, half = fifth[name] - before, weights(resumed)[name] - before
        assert whole.any()
        torch.testing.assert_close(half, whole / 2, atol=1e-6, rtol=1e-3)
    config = json.loads((resumed.folder / "config.json").read_text())
    assert config["fork_from"] == f"{finished.folder}@4"
    assert find_checkpoints(finished.folder / "checkpoints") == [2, 4, 6]


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "model" / "model.safetensors")


@pytest.mark.timeout(600)
def test_a_run_that_everything_happens_to_ends_like_one_that_nothing_happened_to(
    finished, tiny_model, tmp_path
):
    """SIGTERM, dead generators and a killed controller; all but the generators' deaths are resumed
    from, weights go another way each time, and checkpoints are written beside the next step. The
    same metrics and the same model, to the last bit."""

    def resume(transport: str, *more: str, until: int) -> Run:
        again = ["--resume"] if (tmp_path / "run").exists() else []
        how = ["--trainer.weight_sync.transport", transport, "--checkpoint.async_mode", "async"]
        run = Run(tiny_model, tmp_path, *again, *how, *more)
        run.wait_for_line(f"step    {until}")
        return run

    run = resume("rdma", until=0)
    ends_in_order_on_sigterm(run)
    assert "warning: weights go over TCP" in run.output
    run = resume("file", until=2)
    assert list((run.folder / "weights").glob("rank-0-*/*.safetensors"))
    goes_on_with_another_generator(run)
    takes_its_processes_along_when_killed(run)
    leaves_no_snapshot(run)
    run = resume("collective", "--trainer.weight_sync.check", until=4)
    assert "by gloo: each generator receives all of them from 1 trainer rank" in run.output
    goes_on_with_another_generator(run, until=5)  # in a process group of its own
    assert run.finish() == 0, run.output
    checked = [row["sync/mismatch"] for row in run.metrics() if "sync/mismatch" in row]
    assert checked  # not the sync after which the generator was just being replaced
    assert max(checked) <= 1e-4
    assert numbers(run.metrics()) == numbers(finished.metrics())
    left, right = (r.folder / "model" / "model.safetensors" for r in (run, finished))
    assert left.read_bytes() == right.read_bytes()


@pytest.mark.timeout(600)
async def test_a_colocated_run_is_a_separate_one_whoever_is_killed_in_whichever_state(
    finished, tiny_model, tmp_path
):
    """Metrics and model, to the last bit. A generator is killed asleep, and one awake; then the
    trainer offloaded, which ends the run, and it is resumed."""
    config = replace(
        low_tokens(),
        model=str(tiny_model),
        placement="colocated",
        output_dir=str(tmp_path),
        run_name="run",
    )
    async with Controller(config) as controller:
        killer = Killer(
            controller, generator_asleep=[0], generator_awake=[2], trainer_offloaded=[4]
        )
        with pytest.raises(WorkerDiedError, match="for the trainer to wake, the trainer's process"):
            await controller.run()
    assert killer.killed == [
        "generator in turn 0 of trainer",
        "generator in turn 2 of generators",
        "trainer in turn 4 of generators",
    ]
    async with Controller(replace(config, resume=True)) as controller:
        assert controller.steps_done == 4
        await controller.run()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert numbers(rows) == numbers(finished.metrics())
    left, right = (f / "model" / "model.safetensors" for f in (tmp_path / "run", finished.folder))
    assert left.read_bytes() == right.read_bytes()
    assert sum(row["generators/died"] for row in rows[:-1]) == 2
    documented = (ROOT / "docs" / "metrics.md").read_text()
    for row in rows[:-1]:
        own = {key for key in row if key.startswith("turns/")}
        assert own == {"turns/seconds", "turns/generator_gib", "turns/trainer_gib"}
        assert all(f"`{key}`" in documented for key in own)
        assert row["turns/seconds"] > 0


def ends_in_order_on_sigterm(run: Run) -> None:
    processes = run.processes()
    run.process.terminate()  # as a scheduler would; Ctrl-C is tested below, while a run starts
    assert run.finish() == 130, run.output
    assert_all_gone(processes)
    assert "--run_name run --resume" in run.output
    saved = find_checkpoints(run.folder / "checkpoints")[-1]
    assert len(run.metrics()) == saved >= 1


def goes_on_with_another_generator(run: Run, until: int = 3) -> None:
    log = run.folder / "logs" / "generator.log"
    victim = next(p for p in run.processes() if _writes_to(p, log))
    victim.kill()
    run.wait_for_line("generator 0 died; replacing it")
    run.wait_for_line(f"step    {until}")
    assert victim not in run.processes()


def names_the_dead(run: Run, role: str) -> None:
    """Kill an actor in the fourth step: the run ends, and says who has died."""
    run.wait_for_line("step    0")
    processes = run.processes()
    log = run.folder / "logs" / f"{role}.log"
    victim = next(p for p in processes if _writes_to(p, log))
    assert " ".join(victim.cmdline()).strip() == f"torchtitan-rl {role} run"
    run.wait_for_line("step    2")
    victim.kill()
    assert run.finish(timeout=20) == 1, run.output  # Monarch alone takes half a minute to see it
    assert_all_gone(processes)
    # The plain words and nothing else: what Monarch has to say of it is in the logs.
    said = run.output.partition("the run failed")[2]
    assert re.fullmatch(
        rf": while waiting for the {role} to [\w ]+, the {role}'s process was killed by signal 9 "
        rf"\(SIGKILL\)\. Its log: {log}\. If nobody killed it, the machine has run out of memory\."
        rf"( \(in step \d\))?\nlogs: {log.parent}; the same command with --run_name run --resume "
        r"continues\n",
        said,
    )


def takes_its_processes_along_when_killed(run: Run) -> None:
    processes = run.processes()
    run.process.kill()
    run.finish()
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert not alive


def leaves_no_snapshot(run: Run) -> None:
    deadline = time.monotonic() + 10
    while list(run.folder.glob("weights/*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(run.folder.glob("weights/*"))


def test_ctrl_c_while_starting_leaves_nothing(tiny_model, tmp_path):
    run = Run(tiny_model, tmp_path)
    run.wait_for_line("starting the actors")
    deadline = time.monotonic() + 60
    while len(processes := run.processes()) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(processes) >= 3
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.finish(timeout=20) == 130, run.output
    assert_all_gone(processes)
    assert "Traceback" not in run.output


def _writes_to(process: psutil.Process, file: Path) -> bool:
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1") == str(file)
    except OSError:
        return False
