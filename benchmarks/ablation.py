"""What each optimization is worth: the time of a whole step without it, over the time with all.

    python benchmarks/ablation.py                     both models, every optimization
    python benchmarks/ablation.py 135M direct_load norms   one model, some of them
    python benchmarks/ablation.py tiny direct_load,norms   both of them off together

The work is that of peer_trl.py: prompts of 8 samples, 32 new tokens each, sampled, trained on and
synchronized; 8 prompts per step for the tiny model, 2 for 135M, where steps of 8 would take an
hour in all. So what takes the same time in every step, such as loading new weights, counts up to
four times too much there.

For each optimization two Controllers start, with processes of their own: one in which it alone is
switched off by TORCHTITAN_RL_WITHOUT (shared prompts: by their setting), and one with everything
on. They take turns, step by step, so that a machine that slows down meanwhile favours neither; and
they are of one age, because a process gets slower as its heap fragments. `gain` is the median over
these pairs of steps of the time without / with - 1; `spread` is half the distance between their
quartiles. Two Controllers with everything on ("nothing") show how far from 0 a gain of 0 is
measured.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import note, report
from peer_ours import recipe
from peer_trl import OURS, real_model
from peer_work import WARM_UP, Work, endless

from torchtitan_rl.models.makers.tiny import write_tiny_model
from torchtitan_rl.platform.switches import VARIABLE
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.supervision.spawn import end_all_processes

PROMPTS = {"tiny": 8, "135M": 2}
PAIRS = {"tiny": 30, "135M": 8}
STEPS = 10_000
"""More than are ever taken: a Controller takes them until its input ends."""

ENGINE = ("norms", "direct_load")
"""Patches of vLLM on a CPU: torchtitan_rl/engines/vllm/cpu."""
TRAINER = ("packed_attention", "accumulating_linear", "onednn_products", "shared_prompts")
"""Parts of the trainer on a CPU: torchtitan_rl/models/cpu, and a setting."""
PROCESS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
"""Settings of every process for speed: torchtitan_rl/platform. Its settings that keep memory low
are measured by memory.py."""
EVERYTHING = (*ENGINE, *TRAINER, *PROCESS)


async def take_steps(work: Work, settings: dict[str, Any]) -> None:
    """Take a step for each line of the input, and print its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        async with Controller(recipe(work, folder, **settings)) as controller:
            for step, _ in enumerate(sys.stdin):
                started = time.perf_counter()
                await controller.step(step)
                print(time.perf_counter() - started, flush=True)


@contextmanager
def stepping(case: str, work: Path, without: str = "") -> Iterator["subprocess.Popen[str]"]:
    """A process that runs `take_steps`; it ends with the block."""
    setting = without == "shared_prompts"
    settings = OURS[case] | ({"share_prompts": False} if setting else {})
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, __file__, "--take_steps", str(work), json.dumps(settings)],
            env=os.environ | {VARIABLE: "" if setting else without},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        try:
            yield process
        except ValueError:
            said.seek(0)
            note(said.read()[-3000:])
            raise SystemExit(f"the run without {without or 'nothing'} failed") from None
        finally:
            process.communicate()


def seconds(process: "subprocess.Popen[str]") -> float:
    """Have a process take one step; returns its seconds. ValueError if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        print(file=process.stdin, flush=True)
    except BrokenPipeError as error:
        raise ValueError from error
    return float(process.stdout.readline())


def ablate(case: str, model: Path, names: list[str], folder: Path) -> None:
    endless_model = endless(model, folder / f"{case}-endless")
    work = Work(model=str(endless_model), steps=STEPS, prompts=PROMPTS[case])
    file = work.save(folder / f"{case}.json")
    for name in ["", *names]:
        with stepping(case, file) as usual, stepping(case, file, name) as without:
            pairs = [(seconds(usual), seconds(without)) for _ in range(WARM_UP + PAIRS[case])]
        gains = [other / own - 1 for own, other in pairs[WARM_UP:]]
        low, middle, high = statistics.quantiles(gains, n=4, method="inclusive")
        label = f"{case}, {name or 'nothing'}"
        report("ablation", "gain", label, round(middle, 4))
        report("ablation", "spread", label, round((high - low) / 2, 4))
        step = statistics.median(own for own, _ in pairs[WARM_UP:])
        report("ablation", "seconds_per_step", label, round(step, 4))


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--take_steps"]:
        try:
            asyncio.run(take_steps(Work.load(arguments[1]), json.loads(arguments[2])))
        finally:
            end_all_processes()
        return 0
    cases = [argument for argument in arguments if argument in PAIRS] or list(PAIRS)
    names = [argument for argument in arguments if argument not in PAIRS] or list(EVERYTHING)
    if unknown := {part for name in names for part in name.split(",")} - set(EVERYTHING):
        note(f"error: unknown: {', '.join(unknown)}; there are {', '.join([*PAIRS, *EVERYTHING])}")
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
