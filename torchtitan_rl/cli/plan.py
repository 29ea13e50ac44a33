"""`torchtitan-rl plan`: what a run will take of memory and time, before anything is started.

torchtitan-rl plan --config grpo_sum_digits_qwen3_14b --gpus 8xH100
torchtitan-rl plan --config grpo_sum_digits_smollm2_135m        on this machine's CPU

Recipes, and changes to their settings, are as `torchtitan-rl train` takes them.
"""

import argparse
import json
import logging
import os
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from torchtitan_rl.cli.train import CommandError, notice_after, read_overrides, refuse_old_flags
from torchtitan_rl.config import RunConfig
from torchtitan_rl.core.interrupts import end_on_interrupt
from torchtitan_rl.recipes import registry

if TYPE_CHECKING:
    from rich.table import Table

    from torchtitan_rl.run.plan import Plan

PROGRAM = "torchtitan-rl plan"
GIB = 2**30


def main(argv: Sequence[str], *, prog: str = PROGRAM) -> int:
    """Print the plan that the arguments ask for; returns the exit code: 1 if it does not fit."""
    logging.getLogger().setLevel(logging.ERROR)
    try:
        with end_on_interrupt():
            chosen, config = parse(argv, prog=prog)
        if config is None:
            return 0
        # Nothing runs on a GPU, and none that is here is looked at.
        os.environ["TORCHTITAN_RL_PLATFORM"] = "cpu"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        said = nullcontext() if chosen.json else notice_after(1.0, "tracing ...")
        with end_on_interrupt(), said:
            plan = make(chosen, config)
    except ValueError as error:
        from torchtitan_rl.observability.console import print_error

        print_error("error", str(error))
        return 2
    if chosen.json:
        print(json.dumps(plan.to_dict(), indent=2))
    else:
        show(plan)
    return 0 if plan.fits else 1


def parse(
    arguments: Sequence[str], *, prog: str = PROGRAM
) -> tuple[argparse.Namespace, RunConfig | None]:
    """The command's own options, and the recipe with its overrides; None: help was asked for."""
    first = options(prog)
    chosen, overrides = first.parse_known_args(arguments)
    if chosen.config is None and {"-h", "--help"} & set(overrides):
        first.print_help()
        return chosen, None
    known = registry.load_recipes(chosen.module)
    if chosen.config is None:
        raise CommandError(f"--config is missing; recipes: {', '.join(known)}")
    if not 0 < chosen.utilisation <= 1:
        raise CommandError(
            f"--utilisation is a share, above 0 and up to 1; got {chosen.utilisation}"
        )
    for name in ("prompt_tokens", "completion_tokens", "hosts", "gpu_memory_gib", "gpu_tflops"):
        if getattr(chosen, name) < 0:
            raise CommandError(f"--{name} must not be negative")
    recipe = registry.build_recipe(chosen.config, known)
    refuse_old_flags(overrides)
    return chosen, read_overrides(recipe, overrides, prog=f"{prog} --config {chosen.config}")


def options(prog: str) -> argparse.ArgumentParser:
    """The options of the command itself; all others are settings of the recipe."""
    parser = argparse.ArgumentParser(
        prog=prog,
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(__doc__ or "").partition("\n")[0],
        epilog=f"Every setting of a recipe can be changed: {prog} --config <recipe> --help",
    )
    add = parser.add_argument
    add("--config", metavar="RECIPE", help="the recipe to plan")
    add("--module", default=registry.DEFAULT_MODULE, help="your own recipes, as for train")
    add(
        "--gpus", default="", help="8xH100, 64xH200, A100-40GB, ...; without it: this machine's CPU"
    )
    add("--hosts", type=int, default=0, help="hosts that the GPUs are on; 8 GPUs each by default")
    add("--gpu_memory_gib", type=float, default=0.0, help="memory of a GPU, if not the usual")
    add("--gpu_tflops", type=float, default=0.0, help="its dense bfloat16 speed, if not the usual")
    add("--utilisation", type=float, default=0.4, help="share of that speed that is reached")
    add("--prompt_tokens", type=int, default=0, help="tokens of a prompt, on average")
    add("--completion_tokens", type=int, default=0, help="tokens of a completion, on average")
    add("--hf_config", default="", help="a config.json, for a model that is not here yet")
    add("--json", action="store_true", help="print JSON in place of tables")
    return parser


def make(chosen: argparse.Namespace, config: RunConfig) -> "Plan":
    """The plan; imports torch."""
    from torchtitan_rl.run.machine import parse_machine, this_machine

    if chosen.gpus:
        machine = parse_machine(
            chosen.gpus,
            hosts=chosen.hosts,
            memory_gib=chosen.gpu_memory_gib,
            tflops=chosen.gpu_tflops,
        )
    else:
        machine = this_machine()
    import torch  # noqa: F401, or torch's own setting of its loggers would undo ours

    for name in ("torch", "torchtitan"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    from torchtitan_rl.run.plan import make_plan

    return make_plan(
        config,
        machine,
        hf_config=chosen.hf_config,
        prompt_tokens=chosen.prompt_tokens,
        completion_tokens=chosen.completion_tokens,
        utilisation=chosen.utilisation,
    )


# ---- tables -------------------------------------------------------------------------------------


def show(plan: "Plan") -> None:
    """Print a plan as tables."""
    from torchtitan_rl.observability.console import console

    machine = plan.machine
    where = machine.name if machine.is_cpu else f"{machine.count} x {machine.name}"
    console.print(
        f"{plan.model}, {plan.parameters / 1e9:.4g} B parameters, on {where}; prompts of "
        f"{plan.lengths.prompt} and completions of {plan.lengths.completion} tokens; traced in "
        f"{plan.traced_seconds:.1f} s",
        markup=False,
    )
    console.print(memory_table(plan))
    if plan.fix:
        console.print(f"the run does not fit: {plan.fix}", markup=False)
    for memory in plan.memory:
        if memory.fix:
            console.print(f"{memory.actor} does not fit: {memory.fix}", markup=False)
    host = ", ".join(f"{kind} {_gib(nbytes)} GiB" for kind, nbytes in plan.host_bytes.items())
    if host:
        console.print(f"host memory for weights: {host}", markup=False)
    console.print(
        f"KV cache of a generator: {plan.kv_tokens} tokens, {plan.kv_expected} sequences of the "
        f"planned length, {plan.kv_sequences} of the longest; {plan.sequences} side by side\n"
        f"trainer: {plan.tokens} tokens a step, {plan.microbatches} microbatches of "
        f"{plan.row_tokens} tokens on each rank",
        markup=False,
    )
    console.print(stage_table(plan))
    console.print(sync_table(plan))
    for note in plan.notes:
        console.print(f"note: {note}", markup=False)


def memory_table(plan: "Plan") -> "Table":
    """A row for each kind of memory of which a process has a MiB or more, a column for each
    actor."""
    names = (f"{m.actor} x{m.processes}" for m in plan.memory)
    table = _table("memory of each process, GiB", "", *names)
    seen = ((kind, nbytes) for m in plan.memory for kind, nbytes in m.bytes.items())
    for kind in dict.fromkeys(kind for kind, nbytes in seen if nbytes >= 2**20):
        table.add_row(kind, *(_gib(m.bytes.get(kind)) for m in plan.memory))
    table.add_section()
    table.add_row("together", *(_gib(m.total) for m in plan.memory))
    table.add_row("available", *(_gib(m.available) for m in plan.memory))
    table.add_row("fits", *("yes" if m.fits else "NO" for m in plan.memory))
    return table


def stage_table(plan: "Plan") -> "Table":
    """A row for each stage of a step."""
    columns = ("", "TFLOP", "compute s", "memory s", "wire s", "bound", "seconds")
    table = _table(f"a step, for each process, at {plan.utilisation:.0%} of its speed", *columns)
    for stage in plan.stages:
        times = (stage.compute_seconds, stage.memory_seconds, stage.wire_seconds)
        figures = (f"{stage.flops / 1e12:.4g}", *map(_seconds, times))
        table.add_row(stage.name, *figures, stage.bound, _seconds(stage.seconds))
    return table


def sync_table(plan: "Plan") -> "Table":
    """A row for each transport that the run could use."""
    columns = ("transport", "GiB written", "GiB read", "seconds")
    table = _table(f"a sync of the weights; this run uses {plan.transport}", *columns)
    for sync in plan.syncs:
        took = "as the disk" if sync.seconds is None else _seconds(sync.seconds)
        table.add_row(sync.transport, _gib(sync.written), _gib(sync.read), took)
    return table


def _table(title: str, first: str, *others: str) -> "Table":
    """An empty table; all columns but the first have figures."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _gib(nbytes: int | None) -> str:
    if nbytes is None:
        return ""
    return f"{nbytes / GIB:.3g}" if nbytes < GIB else f"{nbytes / GIB:.1f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g}"
