"""`torchtitan-rl train`: a recipe and overrides → a checked config → the run.

torchtitan-rl train --list
torchtitan-rl train --config grpo_sum_digits_tiny --generator.sampling.n 4 --steps 20

What is wrong with the settings by themselves is said before torch is imported.
"""

import argparse
import difflib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from torchtitan_rl.cli.recipes import print_recipes
from torchtitan_rl.cli.submit import is_to_be_submitted, submit
from torchtitan_rl.cli.suggestions import describe_unknown, setting_names
from torchtitan_rl.config import RunConfig
from torchtitan_rl.config.cluster import Launcher
from torchtitan_rl.config.renames import renamed_flag
from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.core.interrupts import end_on_interrupt
from torchtitan_rl.platform.switches import switched_off
from torchtitan_rl.recipes import registry

if TYPE_CHECKING:
    from torchtitan_rl.hosts.launchers.torchrun import Node

PROGRAM = "torchtitan-rl train"
CLUSTER_OPTIONS = {
    "--hosts": "run on these hosts, on which `torchtitan-rl worker` runs",
    "--ssh": "run on these hosts; workers are started on them by ssh",
}
"""Options that are no settings themselves, but set some of `cluster`."""
SILENT_SECONDS = 1.0
"""How long importing torch, vLLM and Monarch may take before the console says so."""


class CommandError(TorchtitanRLError, ValueError):
    """A command line that cannot be understood; the message says what to write instead."""


def main(argv: Sequence[str] | None = None, *, prog: str = PROGRAM) -> int:
    """Train as the arguments say; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The console is for the run; libraries may speak up when something is wrong.
    logging.getLogger().setLevel(logging.ERROR)
    try:
        with end_on_interrupt():
            config = parse(arguments, prog=prog)
            if config is not None and (node := lending_node(config)) is not None:
                from torchtitan_rl.hosts.launchers.torchrun import lend

                return lend(node, config.cluster.port)
            if config is not None and is_to_be_submitted(config):
                return submit(config, arguments, dry="--dry_run" in arguments)
        switched_off()  # modules read it as they are imported, too late for a plain message
    except (ValueError, TorchtitanRLError) as error:
        from torchtitan_rl.observability.console import print_error

        print_error("error", str(error))
        return 2
    if config is None:
        return 0
    with notice_after(SILENT_SECONDS, "loading torch and Monarch ..."), end_on_interrupt():
        from torchtitan_rl.run.launch import launch
    return launch(config, dry="--dry_run" in arguments)


def parse(arguments: Sequence[str], *, prog: str = PROGRAM) -> RunConfig | None:
    """Arguments to a config, or None when they only asked for help or for the list of recipes."""
    first = argparse.ArgumentParser(
        prog=prog,
        add_help=False,
        allow_abbrev=False,
        description="Train a model with a recipe.",
        epilog=f"Every setting of a recipe can be changed: {prog} --config <recipe> --help",
    )
    first.add_argument("--config", metavar="RECIPE", help="the recipe to train")
    first.add_argument(
        "--module",
        default=registry.DEFAULT_MODULE,
        help="your own recipes: path/to/file.py or package.module (default: %(default)s)",
    )
    first.add_argument("--list", action="store_true", help="list the recipes")
    first.add_argument(
        "--dry_run",
        action="store_true",
        help="sample and grade a prompt of each task, show all of it, and train nothing; with "
        "several hosts, say what would be started where, and start nothing",
    )
    for option, meaning in CLUSTER_OPTIONS.items():
        first.add_argument(option, metavar="a,b,...", help=meaning)
    chosen, overrides = first.parse_known_args(arguments)
    if chosen.config is None and {"-h", "--help"} & set(overrides):
        first.print_help()
        return None
    known = registry.load_recipes(chosen.module)
    if chosen.list:
        print_recipes(known)
        return None
    if chosen.config is None:
        typo = difflib.get_close_matches("--config", overrides, n=1)
        said = f" (is {typo[0]!r} meant to be it?)" if typo else ""
        raise CommandError(
            f"--config is missing{said}; recipes: {', '.join(known)} (--list says more)"
        )
    recipe = registry.build_recipe(chosen.config, known)
    refuse_old_flags(overrides)
    recipe = with_hosts(recipe, hosts=chosen.hosts, ssh=chosen.ssh)
    config = read_overrides(recipe, overrides, prog=f"{prog} --config {chosen.config}")
    if not config.run_name and not config.resume:
        config = replace(config, run_name=f"{chosen.config}-{time.strftime('%Y%m%d-%H%M%S')}")
    return config


def lending_node(config: RunConfig) -> "Node | None":
    """Place of this process in a torchrun of which another one is the controller; None: there is no
    torchrun, or this one is."""
    from torchtitan_rl.hosts.launchers.launcher import chosen_launcher

    if chosen_launcher(config.cluster) != "torchrun":
        return None
    from torchtitan_rl.hosts.launchers.torchrun import VARIABLE, Node

    if VARIABLE not in os.environ:  # which is said when the launcher is made
        return None
    node = Node.from_environment(os.environ)
    return node if node.rank else None


def with_hosts(recipe: RunConfig, *, hosts: str | None, ssh: str | None) -> RunConfig:
    """The recipe on the hosts that `--hosts` or `--ssh` names."""
    if hosts is not None and ssh is not None:
        raise CommandError("--hosts has workers that run already, and --ssh starts them: give one")
    given = hosts if ssh is None else ssh
    if given is None:
        return recipe
    names = tuple(name.strip() for name in given.split(",") if name.strip())
    launcher: Launcher = "hosts" if ssh is None else "ssh"
    if not names:
        raise CommandError(f"--{launcher} names no host: --{launcher} node0,node1")
    return replace(recipe, cluster=replace(recipe.cluster, launcher=launcher, hosts=names))


def refuse_old_flags(overrides: Sequence[str]) -> None:
    """Say the new name of a setting that has been renamed."""
    for old, new in filter(None, map(renamed_flag, overrides)):
        raise CommandError(f"{old} is now {new}")


def read_overrides(recipe: RunConfig, overrides: Sequence[str], *, prog: str) -> RunConfig:
    """The recipe with settings changed by command-line options; a bad one ends the process with a
    message, as `--help` does."""
    import tyro

    config, unknown = tyro.cli(
        RunConfig,
        prog=prog,
        description=(
            "Everything that can be set for a run. Beside these settings, --dry_run samples and "
            "grades a prompt of each task, shows all of it, and trains nothing."
        ),
        default=recipe,
        args=overrides,
        use_underscores=True,
        config=(tyro.conf.AvoidSubcommands,),
        return_unknown_args=True,
    )
    if unknown:
        raise CommandError(describe_unknown(unknown, setting_names(recipe), prog=prog))
    return config


@contextmanager
def notice_after(seconds: float, text: str) -> Iterator[None]:
    """Print a line if the block takes longer than that."""
    timer = threading.Timer(seconds, print, args=(text,), kwargs={"flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
