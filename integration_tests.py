"""Whole runs from the command line, by flavor: a recipe plus overrides, run as a person would.

python integration_tests.py OUT --test_suite cpu --test_name all --ngpu 0
python integration_tests.py OUT --test_suite launchers      what Slurm does to a run, on a real one

Each flavor leaves its output in OUT/<name>/; a table says which passed, and why one did not.
"""

import argparse
import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from tests.hosts import slurm_runs, trainings
from torchtitan_rl.algorithms.policy_loss import LOSSES
from torchtitan_rl.core.plugins import nearest
from torchtitan_rl.models.makers.tiny import write_tiny_model
from torchtitan_rl.observability.console import console
from torchtitan_rl.observability.sinks import read_metrics

FLAVOR_TIMEOUT_SECONDS = 280
"""Just under the limit of the test that runs a flavor, so that the flavor's message is seen."""


@dataclass(frozen=True, slots=True)
class Flavor:
    """One whole run: a recipe and what is overridden."""

    name: str
    says: str
    """What it shows, in a line."""
    arguments: tuple[str, ...]
    recipe: str = "grpo_sum_digits_tiny"
    steps: int = 3
    ngpu: int = 0
    """GPUs it needs."""
    quick: bool = False
    """Part of `make test`."""
    mismatch: float = 1e-4
    """Largest difference allowed between trainer and generator logprobs."""
    experts: int = 0
    """Experts of the random model that it starts from; 0: a dense one."""
    imitates: bool = False
    """Whether it starts from a model that has imitated demonstrations: for tasks whose form a
    random model never finds, so that all rewards would be equal."""
    instead: Callable[[], None] | None = None
    """What is done in place of such a run; it raises an error if something is wrong."""


_SMALL = ("--evaluation.prompts", "32", "--prompts_per_step", "16")
_ANY_NUMBER = ("--task.answer", "([0-9]+)")
"""A random model says a number now and then, so that rewards differ."""
_IMITATION = ("--warm_start.steps", "60", "--warm_start.evaluate_every", "60")

_LOSSES = tuple(
    Flavor(name, f"the loss {name}", ("--trainer.loss.name", name))
    for name in LOSSES
    if name != "grpo"  # the default
)

SUITES: dict[str, tuple[Flavor, ...]] = {
    "cpu": (
        Flavor("one_rank", "the default: one trainer rank, one generator", ()),
        Flavor(
            "two_ranks",
            "FSDP2 over two gloo ranks",
            ("--trainer.parallelism.data_parallel_shard_degree", "2", "--trainer.threads", "1"),
        ),
        Flavor(
            "everything",
            "two ranks, two updates a step, both KL terms, every correction, another reduction, "
            "shared prompts",
            (
                *(
                    "--trainer.parallelism.data_parallel_shard_degree",
                    "2",
                    "--trainer.threads",
                    "1",
                ),
                *("--trainer.updates_per_step", "2", "--trainer.loss.name", "dapo"),
                *("--trainer.loss.rollout_kl.coef", "0.1", "--trainer.loss.ref_kl.coef", "0.1"),
                *("--trainer.loss.ref_kl.estimator", "k3"),
                *("--trainer.loss.correction.sequence_outliers", "on"),
                *("--trainer.loss.correction.token_mask", "on"),
                *("--trainer.loss.correction.importance_weight", "token"),
                *("--trainer.loss.correction.sequence_mask", "geometric"),
                *("--trainer.loss.reduction", "sequence_mean", "--advantage.length_penalty"),
                "--trainer.share_prompts",
            ),
            quick=True,
        ),
        *_LOSSES,
        Flavor(
            "rollout_kl",
            "dppo with a soft trust region",
            ("--trainer.loss.name", "dppo", "--trainer.loss.rollout_kl.coef", "0.1"),
        ),
        Flavor(
            "ref_kl",
            "KL to the frozen starting model, an actor of its own",
            ("--trainer.loss.ref_kl.coef", "0.1", "--trainer.loss.ref_kl.estimator", "k3"),
        ),
        Flavor(
            "updates",
            "four optimizer steps on each batch, so that ratios leave 1",
            ("--trainer.updates_per_step", "4", "--trainer.loss.name", "gspo"),
        ),
        Flavor(
            "temperature",
            "sampling at another temperature, which the trainer follows",
            ("--generator.sampling.temperature", "0.7", "--generator.sampling.n", "4"),
        ),
        Flavor(
            "small_microbatches",
            "many microbatches a step",
            ("--trainer.tokens_per_microbatch", "256"),
        ),
        Flavor("shared_prompts", "each prompt computed once", ("--trainer.share_prompts",)),
        Flavor("compiled", "the trainer's layers compiled by torch", ("--trainer.compile",)),
        Flavor(
            "overlong",
            "episodes longer than a microbatch, truncated",
            ("--trainer.tokens_per_microbatch", "40", "--trainer.overlong", "truncate"),
        ),
        Flavor(
            "experts",
            "a mixture of experts, routed in the trainer as in the generator",
            ("--trainer.share_prompts",),
            recipe="grpo_sum_digits_moe_tiny",
            experts=8,
        ),
        Flavor(
            "tools",
            "two tasks with tools, Echo, rollouts that are measured and not trained",
            ("--rollout.untrained_share", "0.2"),
            recipe="echo_calculator_tiny",
            imitates=True,
        ),
        Flavor("mean_baseline", "Dr.GRPO's advantages", ("--advantage.name", "mean_baseline")),
        Flavor("std_normalised", "GRPO's own advantages", ("--advantage.name", "grpo")),
        Flavor("rloo", "leave-one-out advantages", ("--advantage.name", "rloo")),
        *(
            Flavor(
                f"weights_{transport}",
                f"two ranks publish weights by {transport}, compared after each sync",
                (
                    *("--trainer.weight_sync.transport", transport, "--trainer.weight_sync.check"),
                    *("--trainer.parallelism.data_parallel_shard_degree", "2"),
                ),
            )
            for transport in ("shm", "rdma", "file")
        ),
        Flavor(
            "tensor_parallel_generator",
            "two processes share the generator's layers",
            ("--generator.tensor_parallel_degree", "2", "--trainer.weight_sync.check"),
        ),
        Flavor(
            "longer_questions",
            "two to four numbers",
            ("--task.max_numbers", "4", "--generator.sampling.max_tokens", "40"),
        ),
    ),
    "gpu": (
        Flavor(
            "qwen3_0_6b",
            "Qwen3-0.6B on two GPUs",
            (),
            recipe="grpo_sum_digits_qwen3_0_6b",
            ngpu=2,
            mismatch=0.5,
        ),
        Flavor(
            "qwen3_1_7b",
            "Qwen3-1.7B on four GPUs",
            (),
            recipe="grpo_sum_digits_qwen3_1_7b",
            ngpu=4,
            mismatch=0.5,
        ),
    ),
    "launchers": (
        Flavor(
            "slurm_training",
            "submitted, preempted, resumed",
            (),
            instead=trainings.on_slurm,
        ),
        Flavor("ssh_training", "workers started by ssh", (), instead=trainings.by_ssh),
        *(
            Flavor(f"slurm_{name}", says, (), instead=case)
            for name, says, case in slurm_runs.checks()
        ),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output_dir", type=Path, help="where the runs write")
    parser.add_argument("--test_suite", choices=sorted(SUITES), default="cpu")
    parser.add_argument("--test_name", default="all", help="a flavor, 'all' or 'quick'")
    parser.add_argument("--ngpu", type=int, default=0, help="GPUs on this machine")
    options = parser.parse_args(argv)
    try:
        flavors = choose(options.test_suite, options.test_name, options.ngpu)
    except ValueError as error:
        parser.error(str(error))
    results = []
    for flavor in flavors:
        console.print(f"[bold]{flavor.name}[/]: {flavor.says}")
        started = time.monotonic()
        problem = run(flavor, options.output_dir.absolute())
        results.append((flavor, problem, time.monotonic() - started))
    show(results)
    return 1 if any(problem for _, problem, _ in results) else 0


def choose(suite: str, name: str, ngpu: int) -> list[Flavor]:
    """The flavors asked for that this machine can run; asking for none of them is an error."""
    flavors = [
        f for f in SUITES[suite] if name == "all" or f.name == name or (name == "quick" and f.quick)
    ]
    if not flavors:
        known = [*(f.name for f in SUITES[suite]), "all", "quick"]
        raise ValueError(f"unknown test name {name!r} in suite {suite!r}; {nearest(name, known)}")
    runnable = [f for f in flavors if f.ngpu <= ngpu]
    if not runnable:
        raise ValueError(
            f"these flavors need {min(f.ngpu for f in flavors)} GPUs; --ngpu is {ngpu}"
        )
    return runnable


def run(flavor: Flavor, output_dir: Path) -> str:
    """Run a flavor; returns what went wrong, or nothing."""
    folder = output_dir / flavor.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if flavor.instead is not None:
        return do_instead(flavor.instead, folder / "output.txt")
    command = [sys.executable, "-m", "torchtitan_rl.train", "--config", flavor.recipe]
    command += ["--steps", str(flavor.steps), "--output_dir", str(output_dir)]
    command += ["--run_name", f"{flavor.name}/run"]
    if flavor.ngpu == 0:
        command += [*_SMALL, *starting_model(flavor, output_dir / "models")]
    command += flavor.arguments
    log = folder / "output.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parent,
            start_new_session=True,
        )
        try:
            code = process.wait(FLAVOR_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"not done after {FLAVOR_TIMEOUT_SECONDS} s; see {log}"
        finally:  # also on Ctrl-C: whatever is left of the run's session
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if code:
        return f"exit code {code}; see {log}"
    return check(flavor, folder / "run")


def do_instead(check: Callable[[], None], log: Path) -> str:
    """Do what a flavor has in place of a run; returns what went wrong, or nothing."""
    try:
        check()
    except Exception as error:
        log.write_text(traceback.format_exc())
        return f"{str(error).partition(chr(10))[0] or type(error).__name__}; see {log}"
    return ""


def starting_model(flavor: Flavor, folder: Path) -> tuple[str, ...]:
    """Arguments that name the model a flavor starts from; models are kept in `folder`."""
    if flavor.imitates:
        return (*_IMITATION, "--warm_start.cache_dir", str(folder))
    model = folder / f"random-{flavor.experts}-experts"
    if not model.exists():
        write_tiny_model(model, seed=0, experts=flavor.experts)
    return ("--model", str(model), *_ANY_NUMBER)


def check(flavor: Flavor, folder: Path) -> str:
    """What is wrong with what a run wrote, or nothing."""
    rows = read_metrics(folder / "metrics.jsonl")
    if [row["step"] for row in rows] != list(range(flavor.steps + 1)):
        return f"metrics of {flavor.steps} steps expected, found {len(rows)} rows"
    trained = [row for row in rows if "mismatch/all/max" in row]
    if not trained:
        return "no step trained: all advantages were 0"
    if not all(math.isfinite(value) for row in rows for value in row.values()):
        return "a metric is not finite"
    worst = max(row["mismatch/all/max"] for row in trained)
    if not worst <= flavor.mismatch:
        return f"trainer and generator differ by {worst:.2g}; allowed are {flavor.mismatch:.2g}"
    if not (folder / "model" / "model.safetensors").is_file():
        return "no final model was written"
    return ""


def show(results: list[tuple[Flavor, str, float]]) -> None:
    table = Table()
    for column in ("flavor", "what it shows", "seconds", "result"):
        table.add_column(column, justify="right" if column == "seconds" else "left")
    for flavor, problem, seconds in results:
        table.add_row(flavor.name, flavor.says, f"{seconds:.0f}", problem or "passed")
    console.print(table)
    failed = sum(bool(problem) for _, problem, _ in results)
    console.print(f"{len(results) - failed} passed, {failed} failed")


if __name__ == "__main__":
    sys.exit(main())
