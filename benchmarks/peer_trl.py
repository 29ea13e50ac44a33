"""A few steps of GRPO by this library and by TRL 1.16, in one run on one machine: seconds a step,
tokens generated per second of the whole step, the share of the machine's peak, and memory.

    python benchmarks/peer_trl.py              both models; installs TRL once, in an environment
    python benchmarks/peer_trl.py tiny         of its own under outputs/benchmarks
    python benchmarks/run_all.py peer          not part of `make bench`: it takes minutes

The work is the same, and checked to be: one HF folder, the same prompts token for token, 8 prompts
of 8 samples a step, 32 new tokens each (the model cannot end before: see `peer_work.endless`), one
update with AdamW, GRPO's loss without a reference, float32, a reward that costs nothing. Each has
both cores and the machine to itself, is started as a process of its own, and its first step does
not count. They take turns, several times where that does not take long, and this library runs
before and after each of TRL's runs: `speedup_vs_trl` compares a run with the two beside it (medians
of their steps, then of the ratios), so that a machine which slows down meanwhile favours neither.

TRL's settings are the best of what was tried: see peer_theirs.py. One of them, KEEP_MEMORY, is not
TRL's own, and as it is installed it takes a quarter longer or more.

`step_mfu` divides the operations a plain implementation needs (`peer_work.step_flops`, the same for
both) by time and by the fastest float32 matrix product measured in this run. This library trains
on a prompt once for all its samples, so its share of the peak counts work that it saves; with
longer prompts it would gain more by that, with shorter ones less.
`peak_memory_gb` is the proportional set size of all processes, in which shared pages count once.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from common import note, report
from peer_work import WARM_UP, Work, endless, speedups, step_flops

from torchtitan_rl.config.models import SMOLLM2_FOLDER
from torchtitan_rl.models.makers import smollm2
from torchtitan_rl.models.makers.tiny import write_tiny_model
from torchtitan_rl.platform import worker_env

HERE = Path(__file__).parent
VENV = Path("outputs/benchmarks/trl-venv")
PINS = ("trl==1.16.0", "transformers==5.19.0", "accelerate==1.15.0", "datasets==5.2.0")
STEPS = {"tiny": 20, "135M": 3}
TURNS = {"tiny": 3, "135M": 1}
OURS = {
    "tiny": {"replicas": 2, "generator_threads": 1, "tokens_per_microbatch": 16384},
    "135M": {"tokens_per_microbatch": 1280},
}
"""What differs from peer_ours.recipe. The tiny model decodes faster on two cores apart, and its
whole step fits in one pass. For 135M parameters microbatches of 640 tokens take a twentieth longer
and less memory; a second generator gained nothing, for 2 GB more."""
KEEP_MEMORY = {
    name: value
    for name, value in worker_env(0, role="trainer").items()
    if name.startswith("MALLOC_")
}
"""What this library sets for its workers: memory that was freed is not faulted in again. TRL gains
by it too, if somebody sets it, so TRL is measured both ways."""


class PeerError(RuntimeError):
    """Nothing can be compared; the message says why."""


# ---- TRL's virtual environment ----------------------------------------------------------------


def trl_python() -> Path:
    """The interpreter of an environment with TRL, which is made if it is not there."""
    python = VENV / "bin" / "python"
    done = VENV / ".installed"
    if not (done.is_file() and done.read_text() == " ".join(PINS)):
        shutil.rmtree(VENV, ignore_errors=True)
        try:
            install(python)
            done.write_text(" ".join(PINS))
        except BaseException:
            shutil.rmtree(VENV, ignore_errors=True)
            raise
    return python


def install(python: Path) -> None:
    script = Path("scripts/install.sh").read_text()
    version, index = (
        re.findall(rf"^{name}=(\S+)$", script, re.MULTILINE)[0]
        for name in ("TORCH", "PYTORCH_CPU_INDEX")
    )
    note(f"installing {PINS[0]} in {VENV}: once, 2 minutes and 1.5 GB ...")
    run([sys.executable, "-m", "venv", str(VENV)], "making a virtual environment")
    pip = [str(python), "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check"]
    torch_pin = f"torch=={version}+cpu"
    try:
        run([*pip, "install", torch_pin], f"installing {torch_pin}")
    except PeerError:
        run([*pip, "install", "--index-url", index, torch_pin], f"installing {torch_pin}")
    run([*pip, "install", *PINS], f"installing {' '.join(PINS)}")


def run(command: list[str], what: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        lines = done.stdout.splitlines()
        errors = [line[:300] for line in lines if line.startswith("ERROR")] or lines[-5:]
        raise PeerError("\n".join([f"{what} failed; is there a network?", *errors]))


# ---- measuring --------------------------------------------------------------------------------


class PeakMemory:
    """The most memory of a process and all it has started, looked at every few seconds: the kernel
    walks all pages for it, while the process waits for any new one."""

    def __init__(self, pid: int) -> None:
        self.bytes = 0
        self._root = psutil.Process(pid)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(5.0):
            self.bytes = max(self.bytes, self._now())

    def _now(self) -> int:
        total = 0
        try:
            family = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return 0
        for process in family:
            try:
                total += process.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # it has just ended
        return total


@dataclass(kw_only=True)
class Measured:
    """The measured steps of one side (this library or TRL), without the warm-up."""

    seconds: list[float]
    new_tokens: list[int]
    prompts: list[list[int]]
    phases: dict[str, list[float]]
    memory: int

    def __str__(self) -> str:
        split = {name: statistics.median(spent) for name, spent in self.phases.items()}
        parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in split.items())
        steps = ", ".join(f"{seconds:.3g}" for seconds in self.seconds)
        return f"{steps} s a step ({parts}), {self.memory / 1e9:.2f} GB"


def measure(command: list[str], env: dict[str, str]) -> Measured:
    """Run one side to its end."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | env)
    assert process.stdout
    with PeakMemory(process.pid) as memory:
        said = process.stdout.read()
        if process.wait():
            raise PeerError(f"{' '.join(command)} failed")
    found = json.loads(said.splitlines()[-1])
    return Measured(
        seconds=found["seconds"][WARM_UP:],
        new_tokens=found["new_tokens"][WARM_UP:],
        prompts=found["prompts"],
        phases={name: spent[WARM_UP:] for name, spent in found["phases"].items()},
        memory=memory.bytes,
    )


def gemm_peak() -> float:
    """Operations per second of the fastest of some float32 matrix products, on all cores."""
    best = 0.0
    for size in (512, 1024, 2048, 4096):
        a, b = torch.randn(size, size), torch.randn(size, size)
        for _ in range(max(4, 2 * 4096 // size)):
            started = time.perf_counter()
            a @ b
            best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best


# ---- the comparison ---------------------------------------------------------------------------


def compare(case: str, model: Path, python: Path, folder: Path) -> None:
    work = Work(model=str(endless(model, folder / case)), steps=STEPS[case])
    file = str(work.save(folder / f"{case}.json"))
    ours = [sys.executable, str(HERE / "peer_ours.py"), file, json.dumps(OURS[case])]
    theirs = [str(python), str(HERE / "peer_theirs.py"), file]
    offline = {"HF_HUB_OFFLINE": "1"}
    ourselves = ("ours", ours, {})
    turn = [
        *(("TRL", theirs, offline), ourselves),
        *(("TRL keeping memory", theirs, offline | KEEP_MEMORY), ourselves),
    ]
    peak, runs = gemm_peak(), []
    for side, command, env in [ourselves, *turn * TURNS[case]]:
        runs.append((side, measure(command, env)))
        note(f"{case}, {side}: {runs[-1][1]}")
    peak = max(peak, gemm_peak())
    expected = [work.prompts * work.samples * work.new_tokens] * work.steps
    shown = runs[0][1].prompts
    if any(run.prompts != shown or run.new_tokens != expected for _, run in runs):
        raise PeerError(f"{case}: not all did the same work")

    prompts = [len(ids) for ids in shown[WARM_UP * work.prompts :]] * work.samples
    config = json.loads((model / "config.json").read_text())
    flops = step_flops(config, prompts, work.new_tokens) / work.steps
    note(
        f"{case}: {statistics.mean(prompts):.1f} prompt tokens, {work.new_tokens} new ones, "
        f"{flops / 1e12:.3g} TFLOP a step; peak {peak / 1e9:.0f} GFLOP/s"
    )
    for side in dict(runs):
        own = [run for name, run in runs if name == side]
        spent = statistics.median(s for run in own for s in run.seconds)
        name = f"{case}, {side}"
        report("peer_trl", "seconds_per_step", name, spent)
        report("peer_trl", "tokens_per_second", name, expected[0] / spent)
        report("peer_trl", "step_mfu", name, flops / spent / peak)
        report("peer_trl", "peak_memory_gb", name, max(run.memory for run in own) / 1e9)
    for side, name in {"TRL": case, "TRL keeping memory": f"{case}, TRL keeping memory"}.items():
        ratios = speedups([(who, run.seconds) for who, run in runs], side)
        note(f"{name}: {', '.join(f'{ratio:.2f}' for ratio in ratios)} times as fast")
        report("peer_trl", "speedup_vs_trl", name, statistics.median(ratios))


def real_model() -> Path:
    """Folder of the model of `make model`, which is made if it is missing."""
    if smollm2.main([]):
        raise PeerError(f"{SMOLLM2_FOLDER} cannot be made")
    return Path(SMOLLM2_FOLDER)


def main(cases: list[str]) -> int:
    """`tiny` and `135M`, or those that are named."""
    if unknown := set(cases) - set(STEPS):
        note(f"error: no such model: {', '.join(unknown)}; there are {', '.join(STEPS)}")
        return 1
    try:
        python = trl_python()
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            for case in cases or STEPS:
                if case == "tiny":
                    model = write_tiny_model(folder / "tiny-model", seed=0)
                else:
                    model = real_model()
                compare(case, model, python, folder)
    except PeerError as error:
        note(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
