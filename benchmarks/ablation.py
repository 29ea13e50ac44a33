"""What each optimization is worth: the time of a whole step without it, over the time with all.

    python benchmarks/ablation.py                     both models, every optimization
    python benchmarks/ablation.py 135M no_ranks norms  one model, some of them

The work is that of peer_trl.py: 8 prompts of 8 samples per step, 32 new tokens each, sampled,
trained on and synchronized. Each run is a new Controller with new processes, in which one
optimization is switched off by TORCHTITAN_RL_WITHOUT (shared prompts: by their setting). Runs with
everything on come before, between and after them; a run is compared with the two nearest of those,
so that a machine that slows down meanwhile favours neither. `gain` is the step time without / with
- 1; `noise` is the mean of the same figure, without its sign, for the runs with everything on.

An optimization concerns the generator, the trainer or both, which take turns within a step. Only
the part of the step that it concerns is compared, because the other part would only add noise.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common import note, report
from peer_trl import HERE, OURS, real_model
from peer_work import WARM_UP, Work, endless

from torchtitan_rl.models.makers.tiny import write_tiny_model
from torchtitan_rl.platform.switches import VARIABLE

STEPS = {"tiny": 40, "135M": 2}
BASELINE_EVERY = 4
"""So many runs lie between two with everything on."""

ENGINE = ("norms", "no_ranks", "prompt_sharing", "direct_load")
"""Patches of vLLM on a CPU: torchtitan_rl/engines/vllm/cpu."""
TRAINER = (
    "packed_attention",
    "fused_norm",
    "accumulating_linear",
    "onednn_products",
    "kept_logits",
    "last_token",
    "shared_prompts",
)
"""Parts of the trainer on a CPU: torchtitan_rl/models/cpu, models/logprobs.py, models/rank.py."""
PROCESS = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_ARENA_MAX",
    "GOMP_SPINCOUNT",
    "garbage",
)
"""Settings of every process for speed: torchtitan_rl/platform. Its settings that keep memory low
are measured by memory.py."""


@dataclass(frozen=True)
class Run:
    """One run: what was off in it ("" for nothing), and the seconds of its steps."""

    without: str
    step: float
    train: float

    def spent(self, name: str) -> float:
        """Seconds of the part of a step in which the processes work that `name` concerns."""
        if name in TRAINER:
            return self.train
        return self.step - self.train if name in ENGINE else self.step


def measure(case: str, work: str, without: str) -> Run:
    setting = without == "shared_prompts"
    settings = OURS[case] | ({"share_prompts": False} if setting else {})
    done = subprocess.run(
        [sys.executable, str(HERE / "peer_ours.py"), work, json.dumps(settings)],
        env=os.environ | {VARIABLE: "" if setting else without},
        capture_output=True,
        text=True,
    )
    said = without or "nothing"
    if done.returncode:
        note(done.stderr[-3000:])
        raise SystemExit(f"the run without {said} failed")
    found = json.loads(done.stdout.splitlines()[-1])
    step, train = (undisturbed(s) for s in (found["seconds"], found["phases"]["train"]))
    note(f"{case}, without {said}: {step:.4g} s, {train:.4g} s of it training")
    return Run(without, step, train)


def undisturbed(seconds: list[float]) -> float:
    """The lower quartile of the counted steps: whatever else the machine does only adds to it."""
    return statistics.quantiles(seconds[WARM_UP:], n=4, method="inclusive")[0]


def schedule(names: list[str]) -> list[str]:
    """What is off in each run, in order; "" is a run with everything on."""
    runs = [""]
    for done, name in enumerate(names, start=1):
        runs.append(name)
        if done % BASELINE_EVERY == 0 or done == len(names):
            runs.append("")
    return runs


def gain(runs: list[Run], index: int, name: str) -> float:
    """What a step takes longer in run `index` than in the nearest two with everything on, by the
    part that `name` concerns, as a share of their steps."""
    before = [run for run in runs[:index] if not run.without][-1:]
    near = before + [run for run in runs[index + 1 :] if not run.without][:1]
    usual = statistics.mean(run.spent(name) for run in near)
    return (runs[index].spent(name) - usual) / statistics.mean(run.step for run in near)


def ablate(case: str, model: Path, names: list[str], folder: Path) -> None:
    work = Work(model=str(endless(model, folder / f"{case}-endless")), steps=STEPS[case])
    file = str(work.save(folder / f"{case}.json"))
    runs = [measure(case, file, without) for without in schedule(names)]
    for index, run in enumerate(runs):
        if run.without:
            value = round(gain(runs, index, run.without), 4)
            report("ablation", "gain", f"{case}, {run.without}", value)
    usual = [run for run in runs if not run.without]
    report("ablation", "seconds_per_step", case, round(statistics.median(r.step for r in usual), 4))
    inner = [i for i, run in enumerate(runs) if not run.without][1:-1]
    if inner:
        for part, name in (("step", ""), ("engine", ENGINE[0]), ("trainer", TRAINER[0])):
            spread = statistics.mean(abs(gain(runs, i, name)) for i in inner)
            report("ablation", "noise", f"{case}, {part}", round(spread, 4))


def main(arguments: list[str]) -> int:
    everything = [*ENGINE, *TRAINER, *PROCESS]
    cases = [argument for argument in arguments if argument in STEPS] or list(STEPS)
    names = [argument for argument in arguments if argument not in STEPS] or everything
    if unknown := set(names) - set(everything):
        note(f"error: unknown: {', '.join(unknown)}; there are {', '.join([*STEPS, *everything])}")
        return 1
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for case in cases:
            tiny = case == "tiny"
            model = write_tiny_model(folder / "tiny-model", seed=0) if tiny else real_model()
            ablate(case, model, names, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
