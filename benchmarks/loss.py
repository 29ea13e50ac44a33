"""Logprobs at the positions that train, in pieces, against the plain way: all logits at once, then
log_softmax and gather. Forward and backward on the same hidden states; half of the positions train.

The plain side leaves the entropy out, which ours computes on top. Time: both sides take turns in
one process; the ratio is that of the medians. Memory: the peak above the inputs, each side in a
process of its own.
"""

import multiprocessing
import os
import re
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import psutil
import torch
from common import note, report

from torchtitan_rl.models.logprobs import chosen_logprobs

POSITIONS, DIM, VOCAB = 2048, 576, 49152
ROUNDS = 7


def make_inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "hidden": torch.randn(POSITIONS, DIM, requires_grad=True),
        "weight": (0.02 * torch.randn(VOCAB, DIM)).requires_grad_(),
        "targets": torch.randint(VOCAB, (POSITIONS,)),
        "temperatures": torch.full((POSITIONS,), 0.8),
        "trains": torch.rand(POSITIONS) < 0.5,
    }


def plain(x: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = (x["hidden"] @ x["weight"].T).float() / x["temperatures"].unsqueeze(-1)
    logprobs = torch.log_softmax(logits, -1).gather(-1, x["targets"].unsqueeze(-1)).squeeze(-1)
    return logprobs[x["trains"]]


def chosen(x: dict[str, torch.Tensor]) -> torch.Tensor:
    trains = x["trains"]
    logprobs, _ = chosen_logprobs(
        x["hidden"][trains], x["weight"], x["targets"][trains], x["temperatures"][trains]
    )
    return logprobs


SIDES = {"plain": plain, "chosen": chosen}


def gradients(side: str, x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(SIDES[side](x).sum(), (x["hidden"], x["weight"]))


def peak_memory(side: str) -> float:
    """Bytes above the inputs at the worst moment of a forward and backward pass."""
    torch.set_num_threads(os.cpu_count() or 1)
    x = make_inputs()
    Path("/proc/self/clear_refs").write_text("5")  # from here on, the kernel keeps the peak
    before = psutil.Process().memory_info().rss
    gradients(side, x)
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024 - before


def main() -> None:
    note("memory: each side in a process of its own")
    peaks = {}
    for side in SIDES:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as alone:
            peaks[side] = alone.submit(peak_memory, side).result()
        note(f"  {side}: {peaks[side] / 2**20:.0f} MiB")
    report("loss", "peak_memory_ratio", "vocab 49152", peaks["chosen"] / peaks["plain"])

    torch.set_num_threads(os.cpu_count() or 1)
    x = make_inputs()
    for ours, theirs in zip(gradients("chosen", x), gradients("plain", x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    note(f"time: {ROUNDS} rounds in turn")
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(ROUNDS):
        for side, taken in seconds.items():
            started = time.perf_counter()
            gradients(side, x)
            taken.append(time.perf_counter() - started)
    medians = {side: statistics.median(taken) for side, taken in seconds.items()}
    note("".join(f"  {side}: {value:.2f} s\n" for side, value in medians.items()))
    report("loss", "time_ratio", "vocab 49152", medians["chosen"] / medians["plain"])


if __name__ == "__main__":
    main()
