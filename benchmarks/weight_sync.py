"""How fast weights go from one process to another, against a memcpy and against plain gloo.

Writer and reader are processes of their own. All times are medians of warm rounds: buffers are
reused, as in a run. In every round the writer does one memcpy, then publishes, then the reader
reads, each after a message that wakes its process: `publish_vs_memcpy` and `shm_vs_memcpy` compare
what was done in the same condition, that of a run, where seconds lie between two syncs.

`..._vs_memcpy_in_a_loop` is stricter: the same publish and read, against a memcpy that is repeated
without a pause. That makes no difference to large weights; a tiny model's never leave the cache.

Over a network, here its loopback: `collective` and `rdma` against the fastest of several ways to
send as many bytes by plain gloo in the same processes, and two readers against one.

Then a real run with generation ahead of training: how long the optimizer waits for snapshots.
"""

import asyncio
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from async_overlap import real_recipe, run, write_real_model
from common import note, report
from weight_movers import ROUNDS, SIZES, Reader, Writer

from torchtitan_rl.platform import worker_env
from torchtitan_rl.supervision.spawn import end_all_processes, spawn


async def through(writer: Any, reader: Any, transport: str, *, checksums: bool) -> list[float]:
    """Medians of the seconds of a memcpy, and until the weights are free, published, fetched and
    read."""
    await writer.open.call_one(transport, checksums)
    rows = []
    for _ in range(ROUNDS + 3):  # both buffers are warm after two
        memcpy = await writer.memcpy.call_one()
        handle, *published = await writer.publish.call_one()
        rows.append([memcpy, *published, *await reader.read.call_one(handle)])
    return [statistics.median(column) for column in zip(*rows[3:], strict=True)]


async def one_size(case: str) -> None:
    env = worker_env(os.cpu_count() or 1, role="trainer")
    writer = await spawn(Writer, case, env=env)
    reader = await spawn(Reader, case, env=env)
    await reader.actor.open.call_one()
    looped = await writer.actor.memcpy_in_a_loop.call_one()
    note(f"{case}: memcpy in a loop {1000 * looped:.2f} ms")
    for checksums in (False, True):
        memcpy, free, published, _, read = await through(
            writer.actor, reader.actor, "shm", checksums=checksums
        )
        name = f"{case}{', checksums' if checksums else ''}"
        note(
            f"  {name}: memcpy {1000 * memcpy:.2f}, copied {1000 * free:.2f}, "
            f"published {1000 * published:.2f}, read {1000 * read:.2f} ms"
        )
        for reference, seconds in {"memcpy": memcpy, "memcpy_in_a_loop": looped}.items():
            report("weight_sync", f"publish_vs_{reference}", name, seconds / free)
            report("weight_sync", f"shm_vs_{reference}", name, seconds / (published + read))
        report("weight_sync", "seconds", name, published + read)
    await asyncio.gather(writer.stop(), reader.stop())


async def over_network(case: str) -> None:
    env = worker_env(os.cpu_count() or 1, role="trainer")
    writer = await spawn(Writer, case, env=env)
    readers = [await spawn(Reader, case, env=env) for _ in range(2)]
    actors = [writer.actor, *(reader.actor for reader in readers)]
    for reader in readers:
        await reader.actor.open.call_one()
    seconds = {
        transport: (await through(writer.actor, actors[1], transport, checksums=False))[3]
        for transport in ("rdma", "collective")
    }
    seconds["two readers"] = await to_both(writer.actor, actors[1:])
    for size in (2, 3):  # who is in it
        ways = await asyncio.gather(
            *(actor.plain_gloo.call_one(rank, size) for rank, actor in enumerate(actors[:size]))
        )
        for way, taken in ways[1].items():
            seconds[f"{way} by gloo, {size - 1} to receive"] = taken
    note(f"{case}: " + ", ".join(f"{way} {1000 * s:.1f} ms" for way, s in seconds.items()))
    plain = min(taken for way, taken in seconds.items() if way.endswith(", 1 to receive"))
    report("weight_sync", "collective_vs_gloo", case, plain / seconds["collective"])
    report("weight_sync", "rdma_vs_gloo", case, plain / seconds["rdma"])
    cost = seconds["two readers"] / seconds["collective"]
    report("weight_sync", "two_readers_vs_one", case, cost)
    await asyncio.gather(writer.stop(), *(reader.stop() for reader in readers))


async def to_both(writer: Any, readers: list[Any]) -> float:
    """Median of the seconds until both readers have received a snapshot by `collective`."""
    await writer.open.call_one("collective", False)
    rows = []
    for _ in range(ROUNDS + 3):
        handle, *_ = await writer.publish.call_one()
        read = await asyncio.gather(*(reader.read.call_one(handle) for reader in readers))
        rows.append(max(fetched for fetched, _ in read))
    return statistics.median(rows[3:])


async def blocked_share(folder: Path) -> None:
    """In a run with 135M parameters and generation one step ahead."""
    write_real_model(folder)
    half = max(1, (os.cpu_count() or 1) // 2)
    rows = await run(real_recipe(folder, ahead=1, threads=(half, half)), steps=5, warm_up=2)
    for metric, key in {
        "trainer_blocked_share": "sync/blocked_seconds",
        "step_sync_share": "time/sync",
    }.items():
        shares = [row[key] / row["seconds"] for row in rows]
        report("weight_sync", metric, "135M parameters, 1 ahead", statistics.mean(shares))


async def main(parts: list[str]) -> None:
    """`memory`, `network` and `run`, or some of them; with `network=0.6B` only that size."""
    if not parts or "memory" in parts:
        for case in SIZES:
            await one_size(case)
    for case in SIZES:
        if not parts or "network" in parts or f"network={case.split()[0]}" in parts:
            await over_network(case)
    if not parts or "run" in parts:
        with tempfile.TemporaryDirectory() as folder:
            await blocked_share(Path(folder))


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1:]))
    finally:
        end_all_processes()
