"""`torchtitan-rl kubernetes`: manifests of a run, for `kubectl apply -f -`.

torchtitan-rl kubernetes --config R --nodes 4 --gpus_per_node 8 --image I | kubectl apply -f -

Recipes, and changes to their settings, are as `torchtitan-rl train` takes them. Nothing is sent to
the cluster; what to do next is said on stderr.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path, PurePosixPath
from typing import Any

from torchtitan_rl.cli.train import CommandError, read_overrides, refuse_old_flags
from torchtitan_rl.config import RunConfig
from torchtitan_rl.core.interrupts import end_on_interrupt
from torchtitan_rl.hosts.launchers.kubernetes import (
    SHARED,
    KubernetesRun,
    manifests,
    object_name,
    secret_of_run,
    to_yaml,
)
from torchtitan_rl.hosts.secret import load_secret
from torchtitan_rl.recipes import registry

PROGRAM = "torchtitan-rl kubernetes"

HELP = {
    "name": "name of the objects (default: made from the run's)",
    "image": "image with Python and this library",
    "nodes": "workers, each a pod",
    "namespace": "namespace (default: that of kubectl)",
    "gpus_per_node": "GPUs of each worker",
    "cpus_per_node": "CPUs that each worker asks for",
    "memory_per_node": "memory of each worker, such as 800Gi",
    "controller_cpus": "CPUs that the controller asks for",
    "controller_memory": "memory of the controller",
    "shared_memory": "largest size of /dev/shm (default: up to the memory)",
    "claim": "volume claim that is there already (default: torchtitan-rl, which is made)",
    "storage": "size of the volume that is made",
    "storage_class": "its storage class; ReadWriteMany must be possible with it",
    "port": "port of the workers",
    "user": "user and group that all processes run as",
    "python": "interpreter in the image",
    "retries": "starts after errors; lost nodes do not count",
    "stop_seconds": "seconds to save and stop when the controller has to go",
    "pull_secret": "secret for the image's registry",
    "node_selector": "label that a node must have for workers, key=value; can be given repeatedly",
}


def main(argv: Sequence[str], *, prog: str = PROGRAM) -> int:
    """Print the manifests that the arguments ask for; returns the exit code."""
    try:
        with end_on_interrupt():
            return answer(argv, prog=prog)
    except ValueError as error:
        from torchtitan_rl.observability.console import print_error

        print_error("error", str(error))
        return 2


def answer(arguments: Sequence[str], *, prog: str) -> int:
    first = options(prog)
    chosen, overrides = first.parse_known_args(arguments)
    if chosen.config is None and {"-h", "--help"} & set(overrides):
        first.print_help()
        return 0
    known = registry.load_recipes(chosen.module)
    if chosen.config is None:
        raise CommandError(f"--config is missing; recipes: {', '.join(known)}")
    refuse_old_flags(overrides)
    if "--resume" in overrides:
        raise CommandError("--resume is not needed: a run that is there is resumed")
    recipe = registry.build_recipe(chosen.config, known)
    # A wrong setting is said here, not by a pod.
    config = read_overrides(recipe, overrides, prog=f"{prog} --config {chosen.config}")
    if not chosen.image:
        raise CommandError("--image is missing: an image with Python and torchtitan_rl")
    print_manifests(chosen, overrides, config)
    return 0


def options(prog: str) -> argparse.ArgumentParser:
    """The options of the command itself; all others are settings of the recipe."""
    parser = argparse.ArgumentParser(
        prog=prog,
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Print manifests of a run, for `kubectl apply -f -`.",
        epilog=f"Every setting of a recipe can be changed: {prog} --config <recipe> --help",
    )
    add = parser.add_argument
    add("--config", metavar="RECIPE", help="the recipe to train")
    add("--module", default=registry.DEFAULT_MODULE, help="your own recipes, as for train; a file "
        "of them must be in the image or on the volume, under the same name")  # fmt: skip
    add("--secret_file", default="", help="file with your secret, from which the run's is made")
    for field in fields(KubernetesRun):
        how: dict[str, Any] = {"default": field.default, "help": HELP[field.name]}
        if field.name == "node_selector":
            how |= {"default": [], "action": "append", "metavar": "KEY=VALUE"}
        elif field.default is MISSING:
            how["default"] = ""
        elif field.default != "":
            how |= {
                "type": type(field.default),
                "help": f"{how['help']} (default: {field.default})",
            }
        add(f"--{field.name}", **how)
    return parser


def print_manifests(
    chosen: argparse.Namespace, overrides: Sequence[str], config: RunConfig
) -> None:
    """Print the manifests, and on stderr what to do with them."""
    run_name = config.run_name or f"{chosen.config}-{time.strftime('%Y%m%d-%H%M%S')}"
    given = {field.name: getattr(chosen, field.name) for field in fields(KubernetesRun)}
    given["name"] = chosen.name or object_name(run_name)
    given["node_selector"] = dict(map(_label, chosen.node_selector))
    run = KubernetesRun(**given)
    arguments = ["--config", chosen.config, *overrides]
    if chosen.module != registry.DEFAULT_MODULE or Path(chosen.module).is_file():
        arguments += ["--module", chosen.module]
    if not config.run_name:
        arguments += ["--run_name", run_name]
    folder = PurePosixPath(SHARED) / config.output_dir / run_name
    secret = secret_of_run(load_secret(chosen.secret_file), run)
    print(to_yaml(manifests(run, arguments, folder=folder, secret=secret)), end="")
    print(next_steps(run, folder), file=sys.stderr)


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise CommandError(f"--node_selector is <key>=<value>; got {text!r}")
    return key, value


def next_steps(run: KubernetesRun, folder: PurePosixPath) -> str:
    """What to do after `kubectl apply`."""
    where = f" -n {run.namespace}" if run.namespace else ""
    objects = "job,statefulset,service,networkpolicy,secret"
    return (
        f"# follow it:   kubectl{where} logs -f job/{run.name}\n"
        f"# results:     {folder} on the volume of {run.volume_claim}\n"
        f"# the workers keep their GPUs until you remove all but the volume:\n"
        f"#              kubectl{where} delete {objects} -l app.kubernetes.io/instance={run.name}"
    )
