"""What logging costs: a step with everything on against one with everything off, in one run.

Both runs are alive at once and take their steps in turn, so that a machine that gets slower or
faster does so for both. The model is tiny and quick: with a real one, the share is smaller.
"""

import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from async_overlap import Coins
from common import note, report, tiny_recipe

from torchtitan_rl.actors.spawn import end_all_processes
from torchtitan_rl.config import CheckpointConfig, EvaluationConfig
from torchtitan_rl.controller import Controller
from torchtitan_rl.models.tiny import write_tiny_model
from torchtitan_rl.observability.sinks import open_metrics_log

BLOCKS, STEPS = 7, 6
"""The first block is not counted."""


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
    pairs = list(zip(seconds[True], seconds[False], strict=True))[STEPS:]
    more = statistics.median(on - off for on, off in pairs)
    off = statistics.median(off for _, off in pairs)
    note(f"a step takes {off:.3f} s, and {1000 * more:+.0f} ms with everything logged")
    report("logging_cost", "logging_cost_share", "tiny model", more / off)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    finally:
        end_all_processes()
