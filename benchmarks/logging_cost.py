"""What logging costs: a step with everything on against one with everything off.

Both runs are alive at once and take the same steps in turn, so that a machine that gets slower or
faster does so for both. But even two runs that both log nothing differ, by as much as is to be
measured: so there are two pairs, one after the other, and each kind starts first in one of them.
The model is tiny and quick: with a real one, the share is smaller.
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path

from async_overlap import Coins
from common import note, report, tiny_recipe

from torchtitan_rl.config import CheckpointConfig, EvaluationConfig, LogConfig
from torchtitan_rl.models.makers.tiny import write_tiny_model
from torchtitan_rl.observability.sinks import open_metrics_log
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.supervision.spawn import end_all_processes

BLOCKS, STEPS = 11, 3
"""Of a pair. Short blocks: a machine drifts within seconds, by more than is to be measured. Not
counted: the first one, and in each the first step of a kind, where threads of the other may still
be writing."""
WARM_UP = 1
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
        log=LogConfig(rollouts=logs, timeline=logs),
        evaluation=EvaluationConfig(every=1000, prompts=1),
        checkpoint=CheckpointConfig(every=1000),
        output_dir=str(folder),
        run_name="on" if logs else "off",
    )


async def main() -> None:
    pairs = [await measure(first) for first in (True, False)]
    off = statistics.median(chain.from_iterable(pair[False] for pair in pairs))
    more = [[on - off for on, off in zip(pair[True], pair[False], strict=True)] for pair in pairs]
    tell_noise(more, off)
    report("logging_cost", "logging_cost_share", "tiny model", cost(more) / off)


async def measure(first: bool) -> dict[bool, list[float]]:
    """Seconds of the steps that count of two runs, with logs and without; `first` starts first."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_tiny_model(folder / "model", seed=0)
        async with AsyncExitStack() as stack:
            runs = {}
            for logs in (first, not first):
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
    return {logs: counted(each) for logs, each in seconds.items()}


def counted(seconds: list[float]) -> list[float]:
    return [s for step, s in enumerate(seconds) if step >= WARM_UP * STEPS and step % STEPS]


def cost(more: Sequence[Iterable[float]]) -> float:
    """Seconds that logging adds to a step. What it does to a run to start first is added in one
    pair, and taken off in the other."""
    return statistics.mean(statistics.median(pair) for pair in more)


def tell_noise(more: Sequence[Sequence[float]], off: float) -> None:
    """How much the differences of `more` seconds spread, and so their medians."""
    note(f"a step takes {off:.3f} s, and {1000 * cost(more):+.0f} ms with everything logged")
    begun = (statistics.median(pair) for pair in more)
    note("with logs started first {:+.0f} ms, second {:+.0f} ms".format(*(1000 * m for m in begun)))
    # Whole blocks: the steps of one were measured in the same seconds, and err together.
    size, chance = STEPS - 1, random.Random(0)
    blocks = [[pair[i : i + size] for i in range(0, len(pair), size)] for pair in more]
    costs = [
        cost([list(chain.from_iterable(chance.choices(pair, k=len(pair)))) for pair in blocks])
        for _ in range(RESAMPLED)
    ]
    least, *_, most = statistics.quantiles(costs, n=20)
    note(f"other blocks like these would say {least / off:+.3f} to {most / off:+.3f} (90 %)")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    finally:
        end_all_processes()
