"""Whole runs from the command line: reproducible, resumable, interruptible, and tidy."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchtitan_rl.observability.json_lines import read_lines
from torchtitan_rl.observability.run_folder import find_checkpoints
from torchtitan_rl.observability.sinks import read_metrics

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
    timed = ("time/", "tokens_per_second", "generators/died", "sync/")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=1)
    assert not alive


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


@pytest.mark.timeout(600)
def test_a_run_that_everything_happens_to_ends_like_one_that_nothing_happened_to(
    finished, tiny_model, tmp_path
):
    """Ctrl-C, a dead generator and a killed controller; all but the generator's death are resumed
    from, and weights go another way each time. The same metrics and the same model, to the last
    bit."""

    def resume(transport: str, *more: str, until: int) -> Run:
        again = ["--resume"] if (tmp_path / "run").exists() else []
        how = ["--trainer.weight_sync.transport", transport]
        run = Run(tiny_model, tmp_path, *again, *how, *more)
        run.wait_for_line(f"step    {until}")
        return run

    run = resume("rdma", until=0)
    ends_in_order_on_ctrl_c(run)
    assert "warning: weights go over TCP" in run.output
    run = resume("file", until=2)
    assert list((run.folder / "weights").glob("rank-0-*/*.safetensors"))
    goes_on_with_another_generator(run)
    takes_its_processes_along_when_killed(run)
    leaves_no_snapshot(run)
    run = resume("auto", "--trainer.weight_sync.check", until=5)
    assert run.finish() == 0, run.output
    assert run.metrics()[-2]["sync/mismatch"] <= 1e-4
    assert numbers(run.metrics()) == numbers(finished.metrics())
    left, right = (r.folder / "model" / "model.safetensors" for r in (run, finished))
    assert left.read_bytes() == right.read_bytes()


def ends_in_order_on_ctrl_c(run: Run) -> None:
    processes = run.processes()
    started = time.monotonic()
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.finish() == 130, run.output
    assert time.monotonic() - started < 5
    assert_all_gone(processes)
    assert "--run_name run --resume" in run.output
    saved = find_checkpoints(run.folder / "checkpoints")[-1]
    assert len(run.metrics()) == saved >= 1


def goes_on_with_another_generator(run: Run) -> None:
    log = run.folder / "logs" / "generator.log"
    victim = next(p for p in run.processes() if _writes_to(p, log))
    victim.kill()
    run.wait_for_line("generator 0 died; replacing it")
    run.wait_for_line("step    3")
    assert victim not in run.processes()


def names_the_dead(run: Run, role: str) -> None:
    """Kill an actor in the fourth step: the run ends, and says who has died."""
    run.wait_for_line("step    0")
    processes = run.processes()
    log = run.folder / "logs" / f"{role}.log"
    victim = next(p for p in processes if _writes_to(p, log))
    run.wait_for_line("step    2")
    victim.kill()
    assert run.finish(timeout=60) == 1, run.output
    assert_all_gone(processes)
    assert f"waiting for the {role}" in run.output
    assert "--resume continues" in run.output


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
    deadline = time.monotonic() + 60
    while len(run.processes()) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    processes = run.processes()
    assert len(processes) >= 3
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.finish(timeout=5) == 130, run.output
    assert_all_gone(processes)
    assert "Traceback" not in run.output


def _writes_to(process: psutil.Process, file: Path) -> bool:
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1") == str(file)
    except OSError:
        return False
