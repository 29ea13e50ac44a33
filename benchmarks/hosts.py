"""What a run on many hosts costs the controller: with 10 to 1,000 generators, with trainers of up
to 64 data-parallel ranks, and with weight handles of up to 1,024 ranks.

No GPU and no second machine is needed. Generators and trainer are simulated, many generators to a
process, and every message to them is a real one.

python benchmarks/hosts.py                      every part
python benchmarks/hosts.py controller 10 1000   the controller, with 10 and 1,000 generators
python benchmarks/hosts.py relay                weights to 1, 2, 4 and 8 hosts
"""

import asyncio
import itertools
import pickle
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import psutil
import relay_chain
import torch
from async_overlap import recipe
from common import note, report

from torchtitan_rl.actors.simulated import SimulatedGenerator
from torchtitan_rl.batching.grid import make_grid
from torchtitan_rl.core.types import Episode
from torchtitan_rl.hosts.host import LocalProcesses
from torchtitan_rl.models.makers.tiny import write_tiny_model
from torchtitan_rl.platform import worker_env
from torchtitan_rl.run.controller import Controller
from torchtitan_rl.supervision.generators import Generators
from torchtitan_rl.supervision.spawn import Spawned, end_all_processes, spawn
from torchtitan_rl.weight_sync.handle import Part, Slot, WeightHandle, merge_handles

EPISODES, SAMPLES = 4096, 8
GENERATORS = (10, 100, 1000)
PROCESSES = 2
"""That the simulated generators share."""
STEPS, WARM_UP = 7, 2
PARTS = ("controller", "cells", "handles", "relay")
Result = TypeVar("Result")


# ---- the controller with many generators -------------------------------------------------------


class Housed(Spawned):
    """A simulated generator in a process that it shares with others."""

    async def stop(self) -> None:
        """Nothing: its process ends with the benchmark."""


class Seen(LocalProcesses):
    """A process that is looked at as a generator's own; that it ends is waited for once only, and
    not by a thread for each generator in it."""

    def __init__(self, pid: int) -> None:
        self.processes, self.temporary, self._exits = [psutil.Process(pid)], None, []


def housing(config: Controller.Config) -> Callable[[int], Awaitable[Spawned]]:
    """Starts simulated generators, many to a process."""
    made = {"model": config.model, "seed": config.seed}
    env = worker_env(1, role="generator")
    houses: dict[int, asyncio.Task[Spawned]] = {}

    async def start(number: int) -> Spawned:
        home = number % PROCESSES
        if home not in houses:
            first = spawn(SimulatedGenerator, config.generator, **made, env=env)
            houses[home] = asyncio.ensure_future(first)
        house = await houses[home]
        actor = house.procs.spawn(f"g{number}", SimulatedGenerator, config.generator, **made)
        await actor.setup.call_one()
        [process] = house.processes  # one object each: looking at it is not cached
        return Housed(actor, house.procs, [Seen(process.pid)], machines=house.machines)

    return start


async def controller_cost(folder: Path, generators: int, ahead: int) -> float:
    """Milliseconds of a step in which nobody computes anything, per episode; and the controller's
    own CPU time, which is reported too."""
    config = recipe(
        folder,
        prompts_per_step=EPISODES // SAMPLES,
        max_offpolicy_steps=ahead,
        run_name=f"hosts-{generators}-{ahead}",
    )
    sampling = replace(config.generator.sampling, n=SAMPLES)
    config = replace(config, generator=replace(config.generator, sampling=sampling))
    controller = Controller(config)
    # Not `generator.replicas`: each would have a process of its own.
    controller.actors.generators = Generators(housing(config), generators)
    wall, cpu = [], []
    async with controller:
        for step in range(WARM_UP + STEPS):
            started, used = time.perf_counter(), time.process_time()
            await controller.step(step)
            wall.append(time.perf_counter() - started)
            cpu.append(time.process_time() - used)
    case = f"{generators} generators, {EPISODES} episodes, {ahead} ahead"
    spent, used = (1000 * statistics.median(s[WARM_UP:]) / EPISODES for s in (wall, cpu))
    report("hosts", "controller_ms_per_episode", case, spent)
    report("hosts", "controller_cpu_ms_per_episode", case, used)
    return spent


async def many_generators(counts: Sequence[int]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_tiny_model(folder / "model", seed=0, weights=False)
        for ahead in (0, 1):
            spent = [await controller_cost(folder, generators, ahead) for generators in counts]
            case = f"{counts[0]} to {counts[-1]} generators, {ahead} ahead"
            report("hosts", "controller_growth", case, spent[-1] / spent[0])


# ---- the cells of a rank -----------------------------------------------------------------------

EPISODES_PER_RANK = 64


def cells_of_ranks() -> None:
    """Bytes that a rank is sent for a step, with as much work for each rank; and what it would be
    sent with the whole grid."""
    for ranks in (1, 8, 64):
        episodes = some_episodes(ranks * EPISODES_PER_RANK)
        grid = make_grid(episodes, dp_degree=ranks, tokens_per_microbatch=16384)
        started = time.perf_counter()
        sent = [len(pickle.dumps(grid.of_rank(rank))) for rank in range(ranks)]
        seconds = time.perf_counter() - started
        report("hosts", "bytes_per_rank", f"{ranks} ranks", statistics.mean(sent))
        report("hosts", "bytes_of_whole_grid", f"{ranks} ranks", len(pickle.dumps(grid)))
        report("hosts", "pickling_ms_per_rank", f"{ranks} ranks", 1000 * seconds / ranks)


def some_episodes(count: int) -> list[Episode]:
    rng = random.Random(0)
    episodes = []
    for number in range(count):
        prompt, completion = rng.randint(32, 128), rng.randint(32, 512)
        episodes.append(
            Episode(
                policy_version=0,
                prompt_token_ids=[1] * prompt,
                token_ids=[2] * completion,
                token_logprobs=[-1.0] * completion,
                token_versions=[0] * completion,
                reward=1.0,
                advantage=1.0,
                task="coins",
                group_id=f"coins/{number // SAMPLES}",
            )
        )
    return episodes


# ---- weight handles ----------------------------------------------------------------------------

LAYER = {
    **{f"self_attn.{name}_proj.weight": 2 for name in "qkvo"},
    **{f"mlp.{name}_proj.weight": 2 for name in ("gate", "up", "down")},
    **{f"self_attn.{name}_norm.weight": 1 for name in "qk"},
    **{f"{name}_layernorm.weight": 1 for name in ("input", "post_attention")},
}
"""Dimensions of the tensors of a layer."""
ROWS, COLUMNS = 4096, 1024


def published(ranks: int, layers: int) -> list[WeightHandle]:
    """What FSDP ranks publish of a model with this many layers, as the controller receives it: rows
    of every tensor."""
    names = {"model.embed_tokens.weight": 2, "model.norm.weight": 1, "lm_head.weight": 2}
    names |= {f"model.layers.{i}.{n}": dims for i in range(layers) for n, dims in LAYER.items()}
    rows = ROWS // ranks
    handles = []
    for rank in range(ranks):
        slots = []
        for name, dims in names.items():
            rest = (COLUMNS,) * (dims - 1)
            start = (rank * rows, *(0 for _ in rest))
            shape = (rows, *rest)
            slots.append(Slot(name, (ROWS, *rest), start, shape, torch.bfloat16, 0, 2 * rows))
        part = Part(rank, 1, "somewhere", tuple(slots), (1,) * len(slots))
        handles.append(pickle.loads(pickle.dumps(WeightHandle(1, "shm", (part,)))))
    return handles


def handles_of_ranks() -> None:
    """Time to check and merge what ranks have published, for the first time and later; and to
    pickle it for a generator, against pickling every slot."""
    for layers, ranks in itertools.product((3, 36), (1, 8, 64, 1024)):
        case = f"{ranks} ranks, {len(LAYER) * layers + 3} tensors"
        first, again = published(ranks, layers), published(ranks, layers)
        checking, last = timed(lambda ranks=first: merge_handles(ranks))
        later, merged = timed(lambda ranks=again, last=last: merge_handles(ranks, last=last))
        report("hosts", "handle_check_ms", case, checking)
        report("hosts", "handle_check_again_ms", case, later)
        report("hosts", "handle_pickling_ms", case, timed(lambda it=merged: pickle.dumps(it))[0])
        slots = [(part.slots, part.changed) for part in merged.parts]
        whole = timed(lambda slots=slots: pickle.dumps(slots))[0]
        report("hosts", "handle_pickling_slots_ms", case, whole)


def timed(call: Callable[[], Result], rounds: int = 5) -> tuple[float, Result]:
    """Median of the milliseconds that a call takes, and what it returns."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        returned = call()
        seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds), returned


def main(words: list[str]) -> None:
    parts = [word for word in words if not word.isdigit()] or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    for part in parts:
        note(part)
        if part == "controller":
            counts = [int(word) for word in words if word.isdigit()] or GENERATORS
            asyncio.run(many_generators(counts))
        elif part == "cells":
            cells_of_ranks()
        elif part == "relay":
            relay_chain.main()
        else:
            handles_of_ranks()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    finally:
        end_all_processes()
