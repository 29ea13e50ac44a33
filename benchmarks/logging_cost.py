"""What logging costs: a step with everything on against one with everything off, in one run.

Both runs are alive at once and take their steps in turn, so that a machine that gets slower or
faster does so for both. The model is tiny and quick: with a real one, the share is smaller.
"""

import asyncio
import random
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path

from async_overlap import Coins
from common import note, report, tiny_recipe

from torchtitan_rl.actors.spawn import end_all_processes
from torchtitan_rl.config import CheckpointConfig, EvaluationConfig
from torchtitan_rl.controller import Controller
from torchtitan_rl.models.tiny import write_tiny_model
from torchtitan_rl.observability.sinks import open_metrics_log

BLOCKS, STEPS = 17, 3
"""Short blocks: a machine drifts within seconds, by more than is to be measured. Not counted: the
first two, and in each the first step of a kind, where threads of the other may still be writing."""
WARM_UP = 2
RESAMPLED = 2000


def config_for(folder: Path, *, logs: bool) -> Controller.Config:
    recipe = tiny_recipe()
    return replace(
        recipe,
        model=str(folder / "model"),
        warm_start=None,
        task=Coins.Config(),
        steps=BLOCKS * STEPS,
        trainer=replace(recipe.trainer, export_tokens=logs),
        save_rollouts=logs,
        save_timeline=logs,
        evaluation=EvaluationConfig(every=1000, prompts=1),
        checkpoint=CheckpointConfig(every=1000),
        output_dir=str(folder),
        run_name="on" if logs else "off",
    )


async def main() -> None:
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_tiny_model(folder / "model", seed=0)
        async with AsyncExitStack() as stack:
            runs = {}
            for logs in (True, False):
                config = config_for(folder, logs=logs)
                runs[logs] = await stack.enter_async_context(Controller(config))
            log = open_metrics_log(runs[True].folder, runs[True].config, first_step=0)
            for block in range(BLOCKS):
                # Some steps at a time: what a step leaves to its threads falls on its own kind.
                for logs, step in [
                    (logs, block * STEPS + number)
                    for logs in ((True, False) if block % 2 else (False, True))
                    for number in range(STEPS)
                ]:
                    controller = runs[logs]
                    started = time.perf_counter()
                    values = await controller.step(step)
                    if logs:
                        log.write(step, values)
                    seconds[logs].append(time.perf_counter() - started)
            log.close()
            for controller in runs.values():
                controller.rollout_log.close()
    with_logs, without = counted(seconds[True]), counted(seconds[False])
    more = [on - off for on, off in zip(with_logs, without, strict=True)]
    off = statistics.median(without)
    tell_noise(more, off)
    report("logging_cost", "logging_cost_share", "tiny model", statistics.median(more) / off)


def counted(seconds: list[float]) -> list[float]:
    return [s for step, s in enumerate(seconds) if step >= WARM_UP * STEPS and step % STEPS]


def tell_noise(more: list[float], off: float) -> None:
    """How much the differences of `more` seconds spread, and so their median."""
    low, middle, high = (1000 * value for value in statistics.quantiles(more, n=4))
    note(f"a step takes {off:.3f} s, and {middle:+.0f} ms with everything logged")
    note(f"half of the {len(more)} pairs differ by {low:+.0f} to {high:+.0f} ms")
    # Whole blocks: the pairs of one were measured in the same seconds, and err together.
    size, chance = STEPS - 1, random.Random(0)
    blocks = [more[start : start + size] for start in range(0, len(more), size)]
    medians = [
        statistics.median(chain.from_iterable(chance.choices(blocks, k=len(blocks))))
        for _ in range(RESAMPLED)
    ]
    least, *_, most = statistics.quantiles(medians, n=20)
    note(f"other blocks like these would say {least / off:+.3f} to {most / off:+.3f} (90 %)")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    finally:
        end_all_processes()
