"""Memory of every process of a run over its steps, as JSON lines.

    python benchmarks/memory.py                       grpo_sum_digits_tiny, 500 steps
    python benchmarks/memory.py --steps 150 --config echo_calculator_tiny

The figure is the proportional set size (PSS), in which pages that processes share count once in
all. The kernel walks the page tables for it, so processes are looked at every few seconds only. At
the end come, for each process and for the run, the most memory of all and the growth after step 50:
the highest of the last fifth of the steps over the highest of steps 50 to 100.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil
from common import note, report

EVERY_SECONDS = 3.0
SETTLED_STEP = 50
"""From here on memory must not grow."""
MB = 1e6


def role(process: psutil.Process, root: int) -> str:
    """What a process of the run is: its workers are named by their log files.

    Example:
        .../logs/trainer.log: trainer
    """
    if process.pid == root:
        return "controller"
    try:
        log = Path(f"/proc/{process.pid}/fd/1").readlink()
    except OSError:
        return "other"
    return log.stem if log.suffix == ".log" else "other"


def look(root: psutil.Process) -> dict[str, float]:
    """PSS in MB by role, now; processes of one role are added up."""
    found: dict[str, float] = defaultdict(float)
    try:
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return {}
    for process in family:
        try:
            found[role(process, root.pid)] += process.memory_full_info().pss / MB
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # the process has just ended
    return dict(found)


def steps_done(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


def watch(command: list[str], metrics: Path) -> list[tuple[int, dict[str, float]]]:
    """Run to the end; returns the number of finished steps and the memory of each look."""
    looks = []
    with tempfile.TemporaryFile("w+") as said:
        run = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        root = psutil.Process(run.pid)
        while run.poll() is None:
            step, memory = steps_done(metrics), look(root)
            if memory and step:
                looks.append((step, memory))
                report("memory", "pss_mb", f"all, step {step}", round(sum(memory.values()), 1))
                for name, value in memory.items():
                    report("memory", "pss_mb", f"{name}, step {step}", round(value, 1))
            time.sleep(EVERY_SECONDS)
        if run.returncode:
            said.seek(0)
            note(said.read()[-2000:])
            raise SystemExit(run.returncode)
    return looks


def summarize(looks: list[tuple[int, dict[str, float]]], steps: int) -> None:
    # The last steps end with a checkpoint and an evaluation, as others do: they count too.
    series: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for step, memory in looks:
        for name, value in memory.items():
            series[name].append((step, value))
        series["all"].append((step, sum(memory.values())))
    for name, values in series.items():
        report("memory", "peak_mb", name, round(max(value for _, value in values), 1))
        early = [v for step, v in values if SETTLED_STEP <= step < 2 * SETTLED_STEP]
        late = [v for step, v in values if step >= 0.8 * steps]
        if early and late:
            report("memory", "growth_mb", name, round(max(late) - max(early), 1))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="grpo_sum_digits_tiny")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("more", nargs="*", help="further settings of the run, after --")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torchtitan_rl.train", "--config", chosen.config]
        command += ["--steps", str(chosen.steps), "--output_dir", folder, "--run_name", "run"]
        looks = watch([*command, *chosen.more], Path(folder) / "run" / "metrics.jsonl")
    summarize(looks, chosen.steps)
    note(f"{chosen.config}, {chosen.steps} steps, {os.cpu_count()} cores")
    return 0


if __name__ == "__main__":
    sys.exit(main())
