"""Whole runs on several machines, by the commands of the docs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts.machines import Machine, Machines, until
from torchtitan_rl.hosts.secret import VARIABLE

TRAIN = [sys.executable, "-m", "torchtitan_rl.train", "--module", "tests.hosts.recipes"]
TIMES = ("time/", "tokens_per_second", "sync/")
"""Beginnings of names of metrics that differ from run to run."""


@pytest.fixture(scope="module")
def machines():
    with Machines(3, resolve=True) as machines:
        yield machines


@pytest.fixture
def env(tiny_model, tmp_path):
    return {**os.environ, VARIABLE: "a secret for tests", "TEST_MODEL": str(tiny_model)}


def rows(folder: Path) -> list[dict[str, float]]:
    """Metrics by step, without those that no two runs have in common."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(TIMES)}
        for line in lines
    ]


def output_of(process: "subprocess.Popen[str]", seconds: float = 120) -> str:
    """What a command has said, when it has ended well."""
    text, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, text
    return str(text)


def start(machine: Machine, command, env) -> "subprocess.Popen[str]":
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return machine.start(command, env=env, text=True, **both)


def test_two_nodes_of_torchrun_train_as_one_host_does(machines, env, tmp_path):
    """FSDP over both nodes, a generator on each: equal to the last bit."""
    here = [*TRAIN, "--config", "two_ranks", "--output_dir", tmp_path]
    alone = start(machines[2], [*here, "--run_name", "alone"], env)
    output_of(alone)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc_per_node", 1]
    torchrun += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{machines[0].name}:29500"]
    command = [*torchrun, *here[1:], "--run_name", "both"]
    nodes = [start(machine, command, env) for machine in (machines[0], machines[1])]
    said = [output_of(node) for node in nodes]
    assert "each of the 2 hosts has one copy in shared memory" in "".join(said)
    assert rows(tmp_path / "both") == rows(tmp_path / "alone")
    until(lambda: not machines[0].commands() and not machines[1].commands(), "nothing is left")


def lend(machine: Machine, env) -> None:
    command = [sys.executable, "-m", "torchtitan_rl", "worker", "--address", machine.address]
    machine.start(command, env=env, stdout=subprocess.DEVNULL)


def wait_for_steps(run: "subprocess.Popen[str]", folder: Path, steps: int) -> None:
    """Return when a run has done more than so many steps; it does some within seconds."""
    end = time.monotonic() + 90
    file = folder / "metrics.jsonl"
    while not file.exists() or len(file.read_text().splitlines()) < steps:
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < end, f"waited for step {steps}"
        time.sleep(0.05)


def test_hosts_that_are_cut_off_or_die_cost_no_step(machines, env, tmp_path):
    """The controller's machine has no actor; the trainer's is turned off last."""
    with Machines(4, names="host") as (controllers, trainers, *others):
        for machine in (trainers, *others):
            lend(machine, env)
        hosts = ",".join(machine.address for machine in (trainers, *others))
        command = [*TRAIN, "--output_dir", tmp_path, "--config"]
        run = start(
            controllers, [*command, "faults", "--run_name", "faults", "--hosts", hosts], env
        )
        folder = tmp_path / "faults"
        wait_for_steps(run, folder, 3)
        others[0].cut()
        wait_for_steps(run, folder, 6)  # the other generator goes on
        time.sleep(2.5)  # longer than a host may be silent
        others[0].restore()
        wait_for_steps(run, folder, 16)
        trainers.kill()
        time.sleep(0.5)
        trainers.boot()
        lend(trainers, env)
        said = output_of(run)
        for text in (
            f"generator 0 was lost with host {others[0].address}: silent for 2 s",
            f"the trainer has lost host {trainers.address}: the connection was closed",
            "waiting for hosts",
            "resuming after 15 steps",
        ):
            assert text in said, said
        until(lambda: all(len(m.commands()) == 1 for m in (trainers, *others)), "workers are alone")
    output_of(start(machines[2], [*command, "undisturbed", "--run_name", "undisturbed"], env))
    disturbed, undisturbed = rows(folder), rows(tmp_path / "undisturbed")
    assert [row["step"] for row in disturbed] == list(range(len(undisturbed)))
    assert [trained(row) for row in disturbed] == [trained(row) for row in undisturbed]


def trained(row: dict[str, float]) -> dict[str, float]:
    """What a step has trained on and learned."""
    return {name: value for name, value in row.items() if not name.endswith("/died")}


def test_a_run_whose_trainer_does_not_come_back_ends(machines, env, tmp_path):
    """Nothing is left, and the message says how to go on. Another run is told that a worker is
    busy."""
    with Machines(3, names="host") as (controllers, trainers, other):
        for machine in (trainers, other):
            lend(machine, env)
        hosts = f"{trainers.address},{other.address}"
        command = [*TRAIN, "--output_dir", tmp_path, "--hosts", hosts, "--config", "trainer_gone"]
        command += ["--cluster.wait_seconds", 6]
        with (tmp_path / "said").open("w") as said:
            run = controllers.start(
                [*command, "--run_name", "gone"], env=env, stdout=said, stderr=said
            )
        wait_for_steps(run, tmp_path / "gone", 3)
        busy = controllers.run([*command, "--run_name", "second"], env=env)
        assert "it works for run gone since" in " ".join(busy.stderr.split())
        trainers.kill()
        until(lambda: "waiting for hosts" in (tmp_path / "said").read_text(), "the run waits")
        same = controllers.run([*command, "--run_name", "gone", "--resume"], env=env)
        assert same.returncode == 2  # the folder is still locked
        assert "gone" in same.stderr
        run.wait(40)
        text = " ".join((tmp_path / "said").read_text().split())
        assert run.returncode == 1, text
        assert "waiting for hosts" in text
        assert f"waited 6 s (cluster.wait_seconds) for host {trainers.address} (" in text
        assert "the same command with --run_name gone --resume continues" in text
        until(lambda: len(other.commands()) == 1, "the worker is alone")
        assert controllers.commands() == []
