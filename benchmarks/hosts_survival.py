"""Hosts that are turned off, cut off, stopped and robbed of processes during one real run: what it
lost, and how soon it went on.

Three hosts and a controller's machine are network namespaces of this one. A trainer of two ranks is
on two of the hosts, a vLLM generator on each. A trainer's rank is never killed by itself: that ends
a run, on one host as on several, and `--resume` continues it.

python benchmarks/hosts_survival.py                                20 events, outages of 10 to 60 s
python benchmarks/hosts_survival.py --events 5 --outage 5 8        a quick check
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import note, report
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1]))  # the tests' machines and recipes

from tests.hosts.machines import Machine, Machines, read, send
from torchtitan_rl.hosts.secret import VARIABLE
from torchtitan_rl.models.makers.tiny import write_tiny_model
from torchtitan_rl.observability.console import console
from torchtitan_rl.observability.json_lines import read_lines

KINDS = ("machine off", "network cut", "clock stopped", "actor killed", "worker killed")
SILENCE = 4.0
"""The recipe's cluster.silence_seconds: an outage must be longer to be one."""
HASTY = 0.25
"""Share of events that come while the run still recovers from the one before."""
PACE, SLOW_PACE = 0.3, 3.0
"""Seconds that the rewards of a group take, while events come: the run is to last until the end of
the last one. Slow if it would not."""
LANES = (("trainer", "generator 0", "grader"), ("trainer", "generator 1"), ("generator 2",))
"""Actors of each host, as the timeline calls them."""
KILLED = ("torchtitan-rl generator", "torchtitan-rl grader")
"""Beginnings of the titles of processes that are killed by themselves."""


class StuckError(RuntimeError):
    """Something did not happen in time, or the run ended too early."""


@dataclass
class Event:
    """What was done to a host, and when."""

    kind: str
    host: int
    lanes: tuple[str, ...]
    """Actors that it took along."""
    began: float = 0.0
    ended: float = 0.0
    during: str = ""
    """What the run had not recovered from."""
    step_after: float = 0.0
    """Seconds from its end to the next finished step."""
    back_after: float = 0.0
    """Seconds from its end until the last of its actors has done something again."""


@dataclass
class Steps:
    """When steps were finished, from the lines of metrics.jsonl."""

    file: Path
    finished: list[float] = field(default_factory=list)
    lines: int = 0

    def look(self) -> None:
        lines = read(str(self.file)).count("\n")
        if lines > self.lines:
            self.finished.append(time.time())
        self.lines = lines  # fewer, when the run goes on from a checkpoint

    def after(self, moment: float) -> float | None:
        """When the first step was finished after a moment."""
        return next((when for when in self.finished if when > moment), None)


class Trial:
    """The run, its machines, and what is done to them."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.run_folder = folder / "survival"
        self.pace_file, self.output = folder / "pace", folder / "output.txt"
        self.random = random.Random(options.seed)
        self.machines = Machines(4, names="host")
        self.controllers, *self.hosts = self.machines
        self.workers: dict[int, Any] = {}
        self.steps = Steps(self.run_folder / "metrics.jsonl")
        self.events: list[Event] = []
        temporary = folder / "tmp"
        temporary.mkdir()
        self.env = {
            **os.environ,
            VARIABLE: "a secret for benchmarks",
            "TEST_MODEL": str(folder / "model"),
            "TEST_PACE_FILE": str(self.pace_file),
            "TMPDIR": str(temporary),
            "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
        }

    # ---- the run ------------------------------------------------------------------------------

    def lend(self, number: int) -> None:
        """Start the worker of a host."""
        host = self.hosts[number]
        command = [sys.executable, "-m", "torchtitan_rl", "worker", "--address", host.address]
        with (self.folder / f"worker-{number}.txt").open("a") as log:
            self.workers[number] = host.start(command, env=self.env, stdout=log, stderr=log)

    def start(self) -> None:
        """Start workers and run, and watch its steps."""
        write_tiny_model(self.folder / "model", seed=0)
        self.pace_file.write_text(str(PACE))
        for number in range(len(self.hosts)):
            self.lend(number)
        command = [sys.executable, "-m", "torchtitan_rl.train", "--module", "tests.hosts.recipes"]
        command += ["--config", "survival", "--output_dir", str(self.folder)]
        command += ["--run_name", "survival", "--steps", str(self.options.steps)]
        command += ["--hosts", ",".join(host.address for host in self.hosts)]
        with self.output.open("w") as out:
            self.run = self.controllers.start(
                command, env=self.env, stdout=out, stderr=subprocess.STDOUT
            )
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.steps.look()
            if self.pace_file.exists() and self.steps.lines > 0.7 * self.options.steps:
                self.pace_file.write_text(str(SLOW_PACE))
            time.sleep(0.05)

    def wait(self, condition: Callable[[], Any], what: str, *, ending: bool = False) -> None:
        """Return when a condition holds; StuckError if it does not in time, or the run has ended
        (unless that is waited for)."""
        end = time.monotonic() + self.options.patience
        while not condition():
            if time.monotonic() > end:
                raise StuckError(f"waited {self.options.patience:.0f} s {what}")
            if not ending and self.run.poll() is not None:
                raise StuckError(f"the run ended, with code {self.run.returncode}, before {what}")
            time.sleep(0.05)

    def spans(self) -> list[dict[str, Any]]:
        """Spans of the timeline, which a controller begins anew, with the name of their lane."""
        lanes: dict[int, str] = {}
        found = []
        for line in read(str(self.run_folder / "timeline.json")).splitlines():
            with suppress(ValueError):
                event = json.loads(line.rstrip().removesuffix(","))
                if not isinstance(event, dict):
                    continue
                if event.get("name") == "thread_name":
                    lanes[event["tid"]] = event["args"]["name"].split(" (")[0]
                elif event.get("ph") == "X":
                    began = event["ts"] / 1e6
                    ended = began + event["dur"] / 1e6
                    lane = lanes.get(event["tid"], "")
                    found.append(
                        {"lane": lane, "name": event["name"], "began": began, "ended": ended}
                    )
        return found

    # ---- events -------------------------------------------------------------------------------

    def plan(self) -> list[Event]:
        """The events to come: each kind about as often, in any order, on any host."""
        kinds = [KINDS[i % len(KINDS)] for i in range(self.options.events)]
        self.random.shuffle(kinds)
        numbers = [self.random.randrange(3) for _ in kinds]
        return [
            Event(kind, number, LANES[number]) for kind, number in zip(kinds, numbers, strict=True)
        ]

    def happen(self, event: Event) -> None:
        """Have an event happen from its beginning to its end."""
        machine, seconds = self.hosts[event.host], self.random.uniform(*self.options.outage)
        event.began = time.time()
        match event.kind:
            case "machine off":
                machine.kill()
                time.sleep(self.random.uniform(0.5, 5.0))
                machine.boot()
                self.lend(event.host)
            case "network cut":
                machine.cut()
                time.sleep(seconds)
                machine.restore()
            case "clock stopped":
                machine.freeze()
                time.sleep(seconds)
                machine.thaw()
            case "actor killed":
                self._kill_actor(event, machine)
            case "worker killed":
                self.workers[event.host].kill()
                self.workers[event.host].wait()
                time.sleep(self.random.uniform(0.5, 5.0))
                self.lend(event.host)
        event.ended = time.time()

    def _kill_actor(self, event: Event, machine: Machine) -> None:
        found = []
        self.wait(lambda: found.extend(_actors(machine)) or found, "an actor could be killed")
        pid, title = self.random.choice(found)
        who = title.removeprefix("torchtitan-rl ")  # the first generator has no number there
        lanes = [lane for lane in event.lanes if who.startswith(lane.removesuffix(" 0") + " ")]
        event.lanes = tuple(lanes)
        send(pid, 9)
        note(f"  killed {title}")

    def recovered(self, event: Event) -> bool:
        """Whether a step was finished after an event, and its actors have worked again."""
        step = self.steps.after(event.ended)
        back = [self._back(lane, event) for lane in event.lanes]
        if step is None or not all(back):
            return False
        event.step_after = step - event.ended
        event.back_after = max(0.0, max(filter(None, back)) - event.ended)
        return True

    def _back(self, lane: str, event: Event) -> float | None:
        """When an actor has done something after it was started again."""
        spans = self.spans()
        starting = "actors" if lane == "trainer" else lane
        started = [
            span["ended"]
            for span in spans
            if (span["lane"], span["name"]) == (starting, "start") and span["ended"] > event.ended
        ]
        if not started:
            return None
        worked = [
            span["ended"]
            for span in spans
            if span["lane"] == lane
            and span["name"] not in ("start", "end")
            and span["began"] >= min(started) - 0.01
        ]
        return min(worked, default=None)

    def disturb(self) -> None:
        """All events, one after the other."""
        self.wait(lambda: self.steps.lines > 3, "the first steps were done")
        for number, event in enumerate(self.plan()):
            self.events.append(event)
            hasty = number and self.random.random() < HASTY
            if hasty:
                before = self.events[-2]
                time.sleep(self.random.uniform(0.0, 10.0))
                event.during = "" if self.recovered(before) else "the one before"
            elif number:
                self._wait_for_recovery(self.events[-2])
                time.sleep(self.random.uniform(0.0, 4.0))
            note(
                f"{time.strftime('%X')} {number + 1}: {event.kind}, host {event.host} "
                f"{'hasty' if event.during else ''} (step {self.steps.lines})"
            )
            self.happen(event)
        self._wait_for_recovery(self.events[-1])

    def _wait_for_recovery(self, event: Event) -> None:
        what = f"the run recovered from: {event.kind}, host {event.host}"
        self.wait(lambda: self.recovered(event), what)
        note(f"  a step after {event.step_after:.1f} s, all back after {event.back_after:.1f} s")

    # ---- what came of it ----------------------------------------------------------------------

    def finish(self) -> None:
        """Let the run do the rest of its steps, and look at what it has left."""
        self.pace_file.unlink()
        end = time.monotonic() + self.options.steps * 2.0
        while self.run.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        if self.run.poll() is None:
            raise StuckError("waited for the end of the run")
        self.wait(lambda: not self.left(), "nothing was left on any machine", ending=True)

    def left(self) -> list[str]:
        """What is on the machines besides workers."""
        found = []
        for machine in self.machines:
            commands = [c for c in machine.commands() if "torchtitan_rl worker --address" not in c]
            files = machine.run(["ls", "/dev/shm"]).stdout.split()
            found += [f"{machine.name}: {what}" for what in [*commands, *files]]
        return found

    def check(self) -> dict[str, float]:
        """Counts of what must be: steps, rollouts and groups, each once."""
        steps = self.options.steps
        rows = [json.loads(line) for line in self.steps.file.read_text().splitlines()]
        seen = Counter(row["step"] for row in rows)
        samples: Counter[tuple[str, int]] = Counter()
        groups: Counter[str] = Counter()
        failed = 0
        for step in range(steps):
            file = self.run_folder / "rollouts" / f"step-{step:06d}.jsonl"
            lines = [line for _, line in read_lines(file)] if file.exists() else []
            samples.update((line["group"], line["sample"]) for line in lines)
            groups.update({line["group"] for line in lines})
            failed += sum(line["split"] == "discarded" for line in lines)
        expected = steps * 4 * 4  # prompts_per_step, and samples of each
        return {
            "exit_code": self.run.returncode,
            "steps_lost": sum(seen[step] == 0 for step in range(steps + 1)),
            "steps_twice": sum(count > 1 for count in seen.values()),
            "rollouts_lost": expected - len(samples),
            "rollouts_twice": samples.total() - len(samples),
            "rollouts_failed": failed,
            "groups_in_two_steps": groups.total() - len(groups),
            "left_on_machines": len(self.left()),
        }


def _actors(machine: Machine) -> list[tuple[int, str]]:
    """Processes of a host that may be killed by themselves, with their titles."""
    titles = ((pid, read(f"/proc/{pid}/cmdline").split("\0")[0]) for pid in machine.pids())
    return [(pid, title) for pid, title in titles if title.startswith(KILLED)]


def show(trial: Trial) -> None:
    """Every event, as JSON lines and as a table."""
    table = Table(title="events", title_justify="left")
    for column in ("", "event", "host", "outage s", "next step s", "actors back s", "during"):
        table.add_column(column)
    for number, event in enumerate(trial.events):
        recovered = event.ended and trial.recovered(event)
        case = f"{number + 1}: {event.kind}, host {event.host}"
        case += f", during {event.during}" if event.during else ""
        if not recovered:
            table.add_row(str(number + 1), event.kind, str(event.host), "not recovered")
            continue
        report("hosts_survival", "outage_s", case, event.ended - event.began)
        report("hosts_survival", "next_step_s", case, event.step_after)
        report("hosts_survival", "actors_back_s", case, event.back_after)
        times = (event.ended - event.began, event.step_after, event.back_after)
        words = [f"{seconds:.1f}" for seconds in times]
        table.add_row(str(number + 1), event.kind, str(event.host), *words, event.during)
    console.print(table)


def say_why(trial: Trial, error: BaseException) -> None:
    """What the benchmark was waiting for, with the ends of what the run and others have said."""
    note(f"{type(error).__name__}: {error}; at step {trial.steps.lines}")
    files = [trial.output, *sorted(trial.folder.glob("worker-*.txt"))]
    files += sorted((trial.run_folder / "logs").glob("*"))
    for file in files:
        lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
        note(f"---- {file}\n" + "\n".join(lines[-40:]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--outage", type=float, nargs=2, default=(10.0, 60.0), metavar="SECONDS")
    parser.add_argument("--steps", type=int, default=0, help="default: 30 for each event")
    parser.add_argument("--patience", type=float, default=300.0, help="longest wait, in seconds")
    parser.add_argument("--folder", type=Path, help="kept afterwards; default: a temporary one")
    options = parser.parse_args()
    options.steps = options.steps or 30 * options.events
    if min(options.outage) <= SILENCE:
        parser.error(f"--outage: a host that is away for up to {SILENCE:g} s is not missed")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        trial = Trial(options, folder)
        with trial.machines:
            try:
                trial.start()
                trial.disturb()
                trial.finish()
            except (StuckError, TimeoutError) as error:
                say_why(trial, error)
                show(trial)
                return 1
            show(trial)
            counts = trial.check()
            for metric, value in counts.items():
                report("hosts_survival", metric, f"{len(trial.events)} events", value)
    wrong = {name: value for name, value in counts.items() if value}
    note(f"wrong: {wrong}" if wrong else "nothing was lost, doubled or left")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
